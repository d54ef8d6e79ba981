"""The SQL of the ledger, a module a table. It only reads and writes: the rules decide what is booked.

Row locks are always taken in the same order, each kind by key: epochs (shared) → lanes → periods (shared) → pools. A
transaction that holds a pool may read and write its leases: whatever moves units of a lease holds its pool, and
fencing, which changes only a lease's state, needs the epoch alone. Missing rows are inserted first and then locked like
all others.

Every write states what it expects to find, and the number of its rows is compared: a difference ends the transaction.

Limits, plans and regions are not part of that order. A decision about a pool or a share must be made by a catalogue
that was read after the row was locked, or while the catalogue's own lock was held (`lock_catalogue`). Where the
catalogue has to be read before, because it says which rows to lock, `confirm_catalogue` compares it again behind the
locks.
"""
