"""The benchmarks: `./dev bench` runs them, `benchmarks/README.md` says how to read them."""
