"""The one error that a user is meant to read."""


class UserError(Exception):
    """What was given, what was expected, what to do: one sentence, printed without a traceback.

    The command line ends with exit code 2 on it. A bug in fedbayes raises anything else.
    """
