"""The whole of Leasehold on one machine: a Postgres, three stores, the coordinator, an agent in each region.

One launcher starts every process at once, because each of them waits for what it needs. It watches them while they run
and stops them in an order in which nothing is lost: agents return what they did not spend, the coordinator books it,
then the servers stop. What must outlive a run is in one directory (see `data_directory`).
"""
