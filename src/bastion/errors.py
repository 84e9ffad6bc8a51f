"""The one exception a user should ever see."""


class BastionError(Exception):
    """Input, environment or checkpoint that cannot be used; the message says what to do about it.

    The command line prints it in one line and exits with status 2.
    """
