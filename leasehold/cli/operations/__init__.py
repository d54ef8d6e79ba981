"""Commands for operators: the doctor, regions, lanes and rebalances."""
