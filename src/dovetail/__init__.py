"""dovetail: how to run a neural network fastest on the devices you have."""
