"""What users are promised, on the command line and by the names of `dovetail` alone.

Nothing here patches or names what is inside the package, so these tests outlive every rebuild of
it. Commands are processes of their own, with the environment that a user's shell gives them.
"""
