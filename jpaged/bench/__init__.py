"""`jpaged bench`: measures a server, the engine, and how fast either starts. Flags and JSON names are vLLM's."""
