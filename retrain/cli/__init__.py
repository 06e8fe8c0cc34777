"""The entry of the command line. It imports nothing, so that Ctrl-C during the first imports ends
with a line too.
"""


def start() -> int:
    """Run the command line and return its exit code."""
    try:
        from retrain.cli.main import main

        return main()
    except KeyboardInterrupt:
        import sys

        sys.stderr.write("retrain: Interrupted by SIGINT.\n")
        return 130
