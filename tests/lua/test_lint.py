"""The linter for the scripts finds each kind of fault, and nothing in the scripts as they are."""

import pytest

from tests.lua import lint

SOUND = """\
local math_floor, unused = math.floor, nil
for _, key in ipairs(KEYS) do
  local function again(left, ...)
    if left == 0 then return select('#', ...) end
    return again(left - 1, ...)
  end
  local seen = {first = key, ['first'] = again(2, key), 3}
  repeat local is_done = math_floor(seen[3]) > 2 until is_done
  seen[key] = redis.call('GET', key)
  if seen.first then unused = seen.first:len() else error(unused) end
end
"""


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("return redis.cal('GET', KEYS[1]), undefined_name", 1, "undefined global 'undefined_name'"),
        ("local a = 1\nreturn {a = a, b = {[c] = 1}}", 2, "undefined global 'c'"),
        ("return math.rounded(1)", 1, "undefined field 'math.rounded'"),
        ("repeat local a = 1 until true\nreturn a", 2, "undefined global 'a'"),
        ("local a = 1\n\nb = a", 3, "assignment to the global 'b'"),
        ("KEYS = {}", 1, "assignment to the global 'KEYS'"),
        ("function named() end", 1, "assignment to the global 'named'"),
        ("string.sub = nil", 1, "assignment to a field of the global 'string'"),
        ("local a = 1", 1, "variable 'a' is never used"),
        ("local a\na = 1", 1, "variable 'a' is assigned but never read"),
        ("local a = {}\na.b = 1\na[1] = 2", 1, "variable 'a' is assigned but never read"),
        ("local a = 1\nlocal a = 2\nreturn a", 1, "variable 'a' is never used"),
        ("for i = 1, 3 do error('no') end", 1, "loop variable 'i' is never used"),
        ("return function(a, _) return 1 end", 1, "argument 'a' is never used"),
        ("local function f(n) return f(n) end", 1, "function 'f' is never used"),
        ("local a = 1\nif a then local a = 2; return a end", 2, "variable 'a' shadows the variable of line 1"),
        ("local function f(f) return f end\nreturn f", 1, "argument 'f' shadows the function of line 1"),
        ("for i = 1, 3 do\nlocal i = i\nerror(i) end", 2, "variable 'i' shadows the loop variable of line 1"),
        ("local a, b = 1\nreturn a, b", 1, "2 variables and 1 values in an assignment"),
        ("local a = 1, 2\nreturn a", 1, "1 variables and 2 values in an assignment"),
        ("local a = KEYS\na[1], a[2] = 1\nreturn a", 2, "2 variables and 1 values in an assignment"),
        ("return {a = 1, b = 2, a = 3}", 1, "field 'a' is given 2 times"),
        ("do return 1 end\nerror('never')", 2, "unreachable code"),
        (
            "if KEYS[1] then return 1\nelseif ARGV[1] then error('a') return 2\nelse return 3 end\nlocal _ = 1",
            4,
            "unreach",
        ),
        ("if KEYS[1] then\n-- nothing\nend", 1, "empty block"),
        ("if KEYS[1] then error('a') else end", 1, "empty block"),
        ("do end", 1, "empty block"),
        ("return '" + "x" * 112 + "'", 1, "line of 121 characters"),
        ("local a = \nreturn end", 2, "unexpected symbol"),
        ("goto done", 1, "'=' expected"),
        ("return 7 // 2", 1, "unexpected symbol"),
    ],
)
def test_a_fault_is_found_in_its_line(text: str, line: int, what: str) -> None:
    assert any(at == line and what in found for at, found in lint.findings(text)), lint.findings(text)


def test_a_sound_script_has_no_findings() -> None:
    assert not lint.findings(SOUND)


def test_the_scripts_have_no_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert lint.main([]) == 0, capsys.readouterr().out
