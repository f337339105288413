"""The server process of a run whose server is to die: the product's own, wrapped in faults."""

import os

from dovetail.training import serving
from dovetail.training.backends.processes import server
from tests.support.server_faults import Lives, faulty, faulty_files

LIVES = "DOVETAIL_TEST_SERVER_LIVES"
"""The environment variable that names the file of `Lives`."""


def serve(channel):
    crash = Lives.begin(os.environ[LIVES])
    serving.Server = faulty(serving.Server, crash)
    with faulty_files(crash):
        server.serve(channel)
