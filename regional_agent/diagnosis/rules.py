"""The checks of a store and of an agent, as pure rules over facts."""

from urllib.parse import urlsplit

from protocol.addresses import is_loopback
from protocol.diagnosis.checks import Check, Verdict, failure, judge_settings, passed, unknown, warning
from regional_agent.diagnosis.facts import AgentFacts, StoreFacts

KEEPS_ALL = "noeviction"
CLOCK_WARN_MS = 1_000
MEMORY_WARN, MEMORY_FAIL = 0.75, 0.95
MARGIN = 2  # the time-out grows to so many times what 99 of 100 decisions take
ENOUGH_TIMES = 8
MIB = 1024 * 1024


# --- the store --------------------------------------------------------------------------------------------------------


def judge_eviction(facts: StoreFacts) -> Verdict:
    policy, evicted = facts.info.get("maxmemory_policy"), int(facts.info.get("evicted_keys", "0"))
    if policy is None:
        if facts.vouches_for_noeviction:
            return passed("INFO does not show maxmemory_policy; LEASEHOLD_AGENT_STORE_ASSUME_NOEVICTION vouches for it")
        return unknown(
            "INFO does not show maxmemory_policy",
            "Set noeviction in the provider's console, and LEASEHOLD_AGENT_STORE_ASSUME_NOEVICTION=true.",
        )
    if policy != KEEPS_ALL:
        return failure(f"maxmemory-policy is {policy}")
    text = f"{KEEPS_ALL}, {evicted} keys evicted since its start"
    return warning(text) if evicted else passed(text)


def judge_durability(facts: StoreFacts) -> Verdict:
    if facts.info.get("aof_enabled") == "0":
        return warning("appendonly is no: after a restart everything since the last snapshot is in suspense")
    if facts.is_exempt:
        return passed("each write is flushed before it is answered: a restart costs nothing")
    if facts.config is None:
        return unknown(
            "CONFIG is not available, so nothing shows appendfsync; the store is treated as one that may lose writes",
            "Ask the provider how often the store flushes; see docs/guides/stores.md#managed-services-without-config.",
        )
    flushed, on_rewrite = facts.config.get("appendfsync"), facts.config.get("no-appendfsync-on-rewrite")
    if flushed == "no":
        return warning("appendfsync is no: a crash may lose what was admitted in half a minute")
    if flushed == "always" and on_rewrite == "yes":
        return warning(
            "appendfsync is always, but during a rewrite nothing is flushed: no-appendfsync-on-rewrite is yes"
        )
    return passed(f"appendfsync {flushed}: a restart or a failover costs a new epoch")


def judge_writes(facts: StoreFacts) -> Verdict:
    failing = [
        text
        for field, text in (
            ("aof_last_write_status", "the append-only file cannot be written"),
            ("aof_last_bgrewrite_status", "the last rewrite of the append-only file failed"),
            ("rdb_last_bgsave_status", "the last snapshot failed"),
        )
        if facts.info.get(field) == "err"
    ]
    return failure(", and ".join(failing)) if failing else passed("append-only file and snapshots are written")


def judge_memory(facts: StoreFacts) -> Verdict:
    used, bound = int(facts.info.get("used_memory", "0")), int(facts.info.get("maxmemory", "0"))
    bounded_by = "maxmemory" if bound else "the machine's memory, as maxmemory is not set"
    bound = bound or int(facts.info.get("total_system_memory", "0"))
    if not bound:
        return unknown(f"{used // MIB} MiB are used, and INFO shows no bound")
    text = f"{used // MIB} of {bound // MIB} MiB are used ({used / bound:.0%} of {bounded_by})"
    if used / bound >= MEMORY_FAIL:
        return failure(text)
    return warning(text) if used / bound >= MEMORY_WARN else passed(text)


def judge_replicas(facts: StoreFacts) -> Verdict:
    role, replicas = facts.info.get("role"), int(facts.info.get("connected_slaves", "0"))
    if role != "master":
        return failure(f"it is a {role or 'server of unknown role'}, and not a primary")
    if facts.is_single:
        return passed("a single store, which needs no replica" if not replicas else f"{replicas} replicas")
    if not replicas:
        return warning("no replica is connected: nothing can take over")
    lag = [int(each.partition("lag=")[2].partition(",")[0] or 0) for each in _replicas(facts)]
    if lag and min(lag) > 10:
        return warning(f"its replicas are {min(lag)} s behind")
    return passed(f"{replicas} replicas are connected")


def _replicas(facts: StoreFacts) -> list[str]:
    return [text for name, text in facts.info.items() if name.startswith("slave") and "lag=" in text]


def judge_store_clock(facts: StoreFacts) -> Verdict:
    ahead = facts.clock_ahead_ms
    if ahead is None:
        return unknown("TIME was not answered")
    text = f"{abs(ahead) / 1000:.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine"
    return warning(text) if abs(ahead) > CLOCK_WARN_MS else passed(f"within {CLOCK_WARN_MS / 1000:g} s of this machine")


def judge_decision_timeout(facts: StoreFacts) -> Verdict:
    times = facts.times
    if times is None or times.measured < ENOUGH_TIMES:
        return unknown("not enough decisions were measured yet", "Look again in a minute.")
    text = f"99 of 100 decisions take at most {times.p99_ms:.1f} ms"
    wanted = int(MARGIN * times.p99_ms) + 1
    if MARGIN * times.p99_ms > times.most_ms:
        return failure(
            f"{text}, and a request waits at most {times.most_ms} ms: calls are given up that the store executes",
            f"Set LEASEHOLD_AGENT_DECISION_TIMEOUT_MAX_MS to {wanted} or more, or make the store's disk faster.",
        )
    if times.p99_ms > times.set_ms:
        return warning(
            f"{text}, and the time-out is {times.set_ms} ms: it grows up to {times.most_ms} ms by itself",
            f"Set LEASEHOLD_AGENT_DECISION_TIMEOUT_MS to {wanted}.",
        )
    return passed(f"{text}, and the time-out is {times.set_ms} ms")


def judge_store_tls(facts: StoreFacts) -> Verdict:
    if facts.is_encrypted:
        return passed("encrypted, and the certificate is verified")
    return passed("on this machine") if facts.is_local else warning("the connection is not encrypted")


def judge_store_version(facts: StoreFacts) -> Verdict:
    name = "Valkey" if "valkey_version" in facts.info else "Redis"
    version = facts.info.get("valkey_version") or facts.info.get("redis_version")
    if version is None:
        return unknown("INFO shows no version")
    major, minor = (int(part) if part.isdecimal() else 0 for part in (*version.split("."), "0")[:2])
    if name == "Redis" and major < 7:
        return failure(f"Redis {version}")
    if name == "Redis" and (major, minor) < (7, 2):
        return passed(f"Redis {version}; only 7.2 or newer can prove that a write is on disk")
    return passed(f"{name} {version}")


STORE_CHECKS: tuple[Check[StoreFacts], ...] = (
    Check(
        "store_eviction",
        "`maxmemory-policy` and the number of evicted keys",
        "keys were evicted since the store's start",
        "the policy is not `noeviction`",
        "Set maxmemory-policy noeviction: an evicted lease costs a new epoch.",
        judge_eviction,
    ),
    Check(
        "store_durability",
        "`appendonly`, `appendfsync` and `no-appendfsync-on-rewrite`; without `CONFIG` it is unknown",
        "a restart of the store loses more than a second of writes",
        "",
        "Set appendonly yes and appendfsync everysec or always; see docs/guides/stores.md.",
        judge_durability,
    ),
    Check(
        "store_writes",
        "whether the last writes of the append-only file and of snapshots succeeded",
        "",
        "one of them failed",
        "Look at the store's disk: it is full or broken.",
        judge_writes,
    ),
    Check(
        "store_memory",
        "memory in use, of `maxmemory` or of the machine",
        "three quarters are used",
        "95 % are used",
        "Raise maxmemory or the machine's memory: a store that is full denies all charges.",
        judge_memory,
    ),
    Check(
        "store_replicas",
        "the role of the server, its replicas and how far behind they are",
        "a store with Sentinel or a Cluster has no replica, or all are more than ten seconds behind",
        "the server is not a primary",
        "Start a replica, or look at the replication of the one there is.",
        judge_replicas,
    ),
    Check(
        "store_clock",
        "the store's clock beside that of the machine that asks",
        "they differ by more than a second",
        "",
        "Run NTP on both machines: a clock that is set moves the end of a period in this region.",
        judge_store_clock,
    ),
    Check(
        "store_timeout",
        "measured round trips of decisions, flushes included, beside the decision time-out",
        "one of 100 decisions takes longer than the time-out that is set",
        "the time-out cannot grow enough: calls are given up that the store executes",
        "Set the time-outs to what the store needs; see docs/guides/stores.md#circuit-breaker-and-time-outs.",
        judge_decision_timeout,
    ),
    Check(
        "store_tls",
        "whether the connection to a store on another machine is encrypted",
        "it is not",
        "",
        "Use rediss:// (docs/guides/stores.md#tls-to-a-store-rediss), unless the network between them is private.",
        judge_store_tls,
    ),
    Check(
        "store_version",
        "the version of the store",
        "",
        "Redis is older than 7.0",
        "Use Redis 7.2 or newer, or Valkey.",
        judge_store_version,
    ),
)


# --- the agent --------------------------------------------------------------------------------------------------------


def judge_state_dir(facts: AgentFacts) -> Verdict:
    if facts.has_state_dir:
        return passed("the last policies and blocks are kept on disk")
    return warning("LEASEHOLD_AGENT_STATE_DIR is not set: an agent that starts without a coordinator has no policies")


def judge_journal(facts: AgentFacts) -> Verdict:
    if not facts.has_journal:
        return warning("there is no directory for the outage journal: allowances fail closed while the store is away")
    free = facts.journal_free_bytes
    if free is None:
        return unknown("the free space of the journal's file system cannot be read")
    text = f"{free // MIB} MiB are free for a journal of at most {facts.journal_max_bytes // MIB} MiB"
    return warning(text) if free < 2 * facts.journal_max_bytes else passed(text)


def judge_coordinator_link(facts: AgentFacts) -> Verdict:
    plain = [url for url in facts.coordinator_urls if not url.startswith("https://")]
    if not plain:
        return passed("encrypted, and the certificate is verified")
    elsewhere = [url for url in plain if not is_loopback(urlsplit(url).hostname or "")]
    if not elsewhere:
        return passed("on this machine")
    return warning(f"{', '.join(elsewhere)} is not encrypted: the region's token crosses the network in clear")


def judge_exchange_time(facts: AgentFacts) -> Verdict:
    if not facts.exchange_ms:
        return unknown("no exchange has been answered yet", "Look again when the region has used something.")
    text = f"the last exchange took {facts.exchange_ms} ms"
    if facts.exchange_ms >= facts.longest_wait_ms:
        return failure(f"{text}, and none waits longer than {facts.longest_wait_ms} ms")
    return warning(text) if 2 * facts.exchange_ms > facts.longest_wait_ms else passed(text)


def judge_agent_log(facts: AgentFacts) -> Verdict:
    is_debug = facts.log_level == "debug"
    return warning("the log level is debug") if is_debug else passed(f"the log level is {facts.log_level}")


AGENT_CHECKS: tuple[Check[AgentFacts], ...] = (
    Check(
        "agent_settings",
        "variables that begin with `LEASEHOLD_AGENT_`",
        "no setting reads one of them",
        "",
        "Correct or remove the variable: it has no effect.",
        lambda facts: judge_settings(facts.unknown_settings),
    ),
    Check(
        "agent_state_dir",
        "`LEASEHOLD_AGENT_STATE_DIR`",
        "it is not set",
        "",
        "Set it to a directory that outlives the process.",
        judge_state_dir,
    ),
    Check(
        "agent_journal",
        "the directory of the outage journal, and the free space there",
        "there is none, or less than twice a full journal is free",
        "",
        "Set LEASEHOLD_AGENT_JOURNAL_DIR to a directory with room; see docs/guides/stores.md#outage-journal.",
        judge_journal,
    ),
    Check(
        "agent_coordinator_tls",
        "whether the connection to a coordinator on another machine is encrypted",
        "it is not",
        "",
        "Put TLS before the coordinators, and use https:// in LEASEHOLD_AGENT_COORDINATOR_URL.",
        judge_coordinator_link,
    ),
    Check(
        "agent_exchange_time",
        "the round trip of the latest exchange beside the longest time that one waits for its reply",
        "it took more than half of that",
        "it took all of it: replies are given up, and the same exchange is sent again",
        "Look at the network to the coordinator, and at `database_commits`.",
        judge_exchange_time,
    ),
    Check(
        "agent_log",
        "the log level",
        "it is `debug`",
        "",
        "Set LEASEHOLD_AGENT_LOG_LEVEL=info in production.",
        judge_agent_log,
    ),
)
