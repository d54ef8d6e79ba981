-- What Redis and Valkey give to a script (EVALSHA): Lua 5.1 without its ways out, and these. `require` is ours: the
-- files of lua/ are joined before they are sent (regional_agent/store/sources.py).
std = {
  read_globals = {
    "redis", "server", "cjson", "cmsgpack", "struct", "bit",
    "KEYS", "ARGV",
    "require", "assert", "error", "ipairs", "next", "pairs", "pcall", "select", "tonumber", "tostring", "type", "unpack",
    "math", "string", "table",
  },
}
max_line_length = 120
