"""The parts of `./dev bench peers` that decide nothing by the clock."""

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.frame import RESULTS, Load, cells, compare
from benchmarks.load import RefusedError
from benchmarks.peers import report
from benchmarks.peers.generator import KEY, Generator, Request, encode_field, generated
from benchmarks.peers.installing import GO_MODULES, HERE, Installed
from benchmarks.peers.processor_time import parse_ticks, used_us
from benchmarks.peers.run import KINDS_OF_KEYS, SECTIONS, cases, parse_choice
from benchmarks.peers.servers import FIXED_WINDOW, PER_MINUTE, Peer, leasehold_check, leasehold_limits, peers, running

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
SHARED_PACKAGES = ("fastapi", "httptools", "pydantic", "starlette", "uvicorn", "uvloop")


@pytest.mark.parametrize(
    ("number", "value", "encoded"),
    [
        (1, 1, b"\x08\x01"),
        (4, 300, b"\x20\xac\x02"),
        (5, 9_000_000, b"\x28\xc0\xa8\xa5\x04"),
        (2, "key", b"\x12\x03key"),
        (3, [b"", b"\x08\x01"], b"\x1a\x00\x1a\x02\x08\x01"),
    ],
)
def test_fields_are_encoded_as_protobuf_has_them(number: int, value: int | str | list[bytes], encoded: bytes) -> None:
    assert encode_field(number, value) == encoded


def test_a_choice_of_nothing_is_everything() -> None:
    assert parse_choice("").is_everything
    assert not parse_choice("servers").is_everything


def test_a_choice_names_sections_and_kinds_of_keys() -> None:
    choice = parse_choice("servers,random")
    assert choice.has("servers", "random")
    assert not choice.has("servers", "hot")
    assert not choice.has("libraries", "random")
    assert parse_choice("hot").sections == set(SECTIONS)
    assert parse_choice("libraries").keys == set(KINDS_OF_KEYS)


def test_a_choice_of_something_unknown_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="no part 'server'; its parts are: servers, open-loop"):
        parse_choice("server,hot")


def figures(**changed: object) -> bytes:
    measured = {"per_second": 1000.0, "decisions": 2000, "refused": 0, "refusal": "", "p50_us": 1, "p99_us": 2}
    return json.dumps(measured | {"late_p99_us": 0} | changed).encode()


def test_a_run_with_too_many_refusals_is_no_measurement() -> None:
    assert generated(figures(refused=100)).load == Load(1000, 1, 2, refused=100)
    with pytest.raises(RefusedError, match=r"101 of 2101 responses were like HTTP/1\.1 503"):
        generated(figures(refused=101, refusal="HTTP/1.1 503"))
    with pytest.raises(RefusedError):
        generated(figures(decisions=0))


def test_processor_time_is_read_behind_a_name_that_contains_anything() -> None:
    assert parse_ticks("42 (a ) b) S 1 2 3 4 5 6 7 8 9 10 120 30 0 0 20 0") == 150
    assert used_us(None) == 0


async def test_processor_time_has_columns_where_it_was_measured() -> None:
    async def turn() -> Load:
        return Load(1.0, 1.0, 1.0, 0, cpu_us=44.0, store_cpu_us=8.25)

    rows = await compare({"a server": turn}, repeats=1, fewest=1)
    headings, (row,) = cells(rows)
    assert headings[-2:] == ["CPU µs", "store's CPU µs"]
    assert row[-2:] == ["44.0", "8.2"]


def test_offered_rates_are_columns() -> None:
    (case,) = cases({"a server": {2_000: [1.0, 2.0, 4.0], 20_000: [9.0]}})
    assert cells([case]) == (["2,000/s", "20,000/s"], [["a server", "2.0 (1.0 to 4.0)", "9.0"]])


def test_the_key_of_a_request_is_the_placeholder_of_the_generator() -> None:
    assert f'[]byte("{KEY}")' in (HERE / "loadgen" / "main.go").read_text()
    assert leasehold_check(FIXED_WINDOW) == {"subject": {"tenant": KEY, "route": FIXED_WINDOW, "method": "GET"}}


def test_each_route_of_leasehold_has_its_own_quota() -> None:
    document = leasehold_limits()
    assert json.dumps(document).count('"by": ["tenant"]') == 3
    assert json.dumps(document).count('"slices": false') == 1


def test_each_server_has_the_same_limit_and_a_store_of_its_own(tmp_path: Path) -> None:
    programs = ("ratelimit", "limitador-server", "gubernator")
    installed = installed_in(tmp_path, *programs)
    every = list(peers(installed, 30_000, tmp_path))
    assert [Path(each.command[0]).name for each in every] == [programs[0], programs[1], programs[1], programs[2]]
    assert len({each.address for each in every}) == len(every)
    stores = [each.store_port for each in every if each.store_port is not None]
    assert len(set(stores)) == len(stores) == 2
    assert all("own memory" in each.name for each in every if each.store_port is None)
    for config in (tmp_path / "ratelimit" / "config" / "peers.yaml", tmp_path / "limitador.yaml"):
        assert str(PER_MINUTE) in config.read_text()
    assert encode_field(4, PER_MINUTE) in every[-1].request.body


def test_a_server_that_is_missing_is_left_out(tmp_path: Path) -> None:
    installed = installed_in(tmp_path, "ratelimit", "gubernator")._replace(
        missing={"gubernator": "the network is away"}
    )
    assert [each.name for each in peers(installed, 30_000, tmp_path)] == ["envoyproxy/ratelimit, fixed window, gRPC"]


async def test_a_server_that_does_not_start_is_named_with_what_it_logged(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('an unknown option')"]
    peer = Peer("a server", command, {}, "127.0.0.1:9", Request(b"", ""))
    missing: dict[str, str] = {}
    async with running([peer], Generator(Path(sys.executable)), lambda _pid: None, tmp_path, missing) as targets:
        assert targets == []
    assert "an unknown option" in missing["a server"]


def installed_in(directory: Path, *programs: str) -> Installed:
    (directory / "bin").mkdir()
    for name in programs:
        (directory / "bin" / name).touch(mode=0o755)
    return Installed(directory, missing={})


def test_services_of_both_sides_run_on_the_same_framework() -> None:
    ours, theirs = (pins(path) for path in (ROOT / "requirements.lock", HERE / "requirements.txt"))
    assert {name: theirs[name] for name in SHARED_PACKAGES} == {name: ours[name] for name in SHARED_PACKAGES}


def test_programs_are_pinned_by_version_and_hash() -> None:
    assert all(re.search(r"@v\d", each.version) and each.hash.startswith("h1:") for each in GO_MODULES)


def test_the_readme_and_its_picture_show_the_results() -> None:
    document = json.loads((RESULTS / "peers.json").read_text())
    assert report.in_markdown(document) in report.README.read_text()
    assert report.drawn(document) == (RESULTS / f"{report.PICTURE}.svg").read_text()


def test_the_table_is_written_between_its_markers_and_nowhere_else() -> None:
    document = json.loads((RESULTS / "peers.json").read_text())
    once = report.with_table(f"# Before\n{report.BEGIN}old\n{report.END}after\n", document)
    assert once == f"# Before\n{report.in_markdown(document)}after\n"
    assert report.with_table(once, document) == once


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(SystemExit, match="the README has no lines"):
        report.with_table("# Before\n", json.loads((RESULTS / "peers.json").read_text()))


def pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", path.read_text(), flags=re.MULTILINE))
