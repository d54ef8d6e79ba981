-- The reasons of denials as numbers: protocol/outcomes.py has the same words in the same order.
--
-- KEYS     none
-- ARGV     none
-- Returns  {reason = number}

return {
  no_lease = 1,
  lease_expired = 2,
  lease_spent = 3,
  rate_exceeded = 4,
  cost_above_limit = 5,
  slots_taken = 6,
  hold_needed = 7,
}
