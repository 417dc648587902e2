"""`python -m benchmarks.planner`."""

from benchmarks.planner.counts import main

if __name__ == "__main__":
    main()
