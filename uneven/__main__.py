"""`python -m uneven`: the command line where the console script is not on the PATH."""

from uneven.cli.main import main

main()
