"""The console: a page for operators, made of the files that lie here, and the calls behind it."""
