"""Training steps without dovetail, which others are compared with."""


def plain_steps(optimizer, loss, steps):
    """The loss of each of so many steps, of which each updates by a torch optimizer. `loss()`
    computes it."""
    for _ in range(steps):
        value = loss()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        yield value.detach()
