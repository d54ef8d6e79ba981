-- What Redis and Valkey give to a script (EVALSHA): Lua 5.1 without its ways out, and these.
std = {
  read_globals = {
    "redis", "server", "cjson", "cmsgpack", "struct", "bit",
    "KEYS", "ARGV",
    "assert", "error", "ipairs", "next", "pairs", "pcall", "select", "tonumber", "tostring", "type", "unpack",
    "math", "string", "table",
  },
}
max_line_length = 120
