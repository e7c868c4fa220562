"""The longer commands of `jpaged`, a file each: `add_…` describes one to the parser and says what runs it."""
