"""The command line: one function per subcommand; heavy imports sit inside it."""
