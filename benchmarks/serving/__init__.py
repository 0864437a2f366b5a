"""What the benchmarks of servers share; not a benchmark itself."""
