"""Compare the database's guards with those of the schema: what refuses a change must itself be unchanged.

Triggers, constraints, unique indexes, functions and privileges keep everyone from editing the ledger. A guard that was
dropped, disabled or replaced leaves no trace in the rows, so the database's catalogue is read. The guards of the newest
schema are in `migrations/guards.json`, which `./dev guards` writes. Partitions, one for each period, follow a rule.
"""

from collections.abc import Collection, Mapping
from importlib.resources import files

import msgspec

import migrations
from coordinator.database.connection import Connection
from coordinator.health.readiness import schema_revision
from coordinator.proof.rules import FaultKind, LedgerFault
from migrations.roles import CHANGES, COORDINATOR, FUNCTIONS, PRIVILEGES

PATIENCE_S = 600.0


class Guards(msgspec.Struct, frozen=True):
    """The guards of one revision of the schema: by kind, table and name, their definitions."""

    revision: str
    guards: Mapping[str, str]


def expected_guards() -> Guards:
    return msgspec.json.decode(files(migrations).joinpath("guards.json").read_bytes(), type=Guards)


async def read_guards(connection: Connection) -> dict[str, str]:
    """Return the definition of each guard by `kind table.name`, without those of partitions."""
    rows = await connection.fetch(_GUARDS, timeout=PATIENCE_S)
    return {f"{row['kind']} {row['name']}": row["definition"] for row in rows}


async def guards_are_known(connection: Connection) -> bool:
    """Return whether the guards of this schema are known. During an upgrade the schema may be a newer one."""
    return await schema_revision(connection) == expected_guards().revision


async def fault_of_guards(connection: Connection) -> LedgerFault | None:
    """Return the first guard that is missing, disabled, replaced or not of the schema."""
    expected = expected_guards().guards
    ours = {_table_of(name) for name in expected}
    found = {name: made for name, made in (await read_guards(connection)).items() if _table_of(name) in ours}
    return (
        _difference(expected, found)
        or await _fault_of_partitions(connection)
        or await _fault_of_privileges(connection)
        or await _fault_of_switches(connection)
    )


def _difference(expected: Mapping[str, str], found: Mapping[str, str]) -> LedgerFault | None:
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) == found.get(name):
            continue
        if name not in found:
            return _fault(name, "it is missing")
        if name not in expected:
            return _fault(name, "no migration made it")
        return _fault(name, f"it is not as the migrations made it: {found[name]}")
    return None


def _fault(name: str, reason: str) -> LedgerFault:
    return LedgerFault(FaultKind.GUARD_CHANGED, reason, table=_table_of(name), key=name)


def _table_of(name: str) -> str:
    """Return the table of a guard, or the name of a function. Other objects of the database are not checked."""
    return name.partition(" ")[2].partition(".")[0]


async def _fault_of_partitions(connection: Connection) -> LedgerFault | None:
    """Compare the triggers of partitions: none may be truncated, and those of closed periods refuse new rows."""
    of_all = {*(row["trigger"] for row in await connection.fetch(_ROW_TRIGGERS)), TRUNCATED}
    for row in await connection.fetch(_PARTITIONS):
        expected = of_all | ({CLOSED} if row["is_closed"] else set())
        before, after = (
            {f"trigger {row['partition']}.{name}": name for name in names} for names in (expected, row["triggers"])
        )
        if fault := _difference(before, after):
            return fault
    return None


TRUNCATED = "transfer_is_never_truncated by refuse_change"
CLOSED = "transfer_is_of_a_closed_period by refuse_transfer"


async def _fault_of_privileges(connection: Connection) -> LedgerFault | None:
    """Compare privileges: the coordinator's role has those of the schema, and no other role may write."""
    tables = {row["relname"] for row in await connection.fetch(_TABLES)}
    rows = await connection.fetch(_PRIVILEGES, sorted(tables & PRIVILEGES.keys()))
    rows += await connection.fetch(_EXECUTES)
    of_coordinator = {row["privilege"] for row in rows if row["role"] == COORDINATOR}
    others = {f"{row['privilege']} to {row['role']}" for row in rows if row["role"] != COORDINATOR and row["writes"]}
    # An owner that may not create roles granted no privileges: then the coordinator connects as the owner.
    expected = _granted(tables) if of_coordinator else set()
    before = {f"privilege {each}": each for each in expected}
    after = {f"privilege {each}": each for each in of_coordinator | others}
    return _difference(before, after)


def _granted(tables: Collection[str]) -> set[str]:
    whole = {f"{table}.{may}" for table, all_ in PRIVILEGES.items() if table in tables for may in all_.split(", ")}
    columns = {
        f"{table}.{column}.UPDATE" for table, names in CHANGES.items() if table in tables for column in names.split()
    }
    return whole | columns | {f"{name}.EXECUTE" for name in FUNCTIONS}


async def _fault_of_switches(connection: Connection) -> LedgerFault | None:
    """Find what disables guards: disabled foreign keys, rules, row security, or settings that silence triggers."""
    row = await connection.fetchrow(_SWITCHES)
    return None if row is None else _fault(f"switch {row['name']}", "it keeps guards from being asked")


# --- the statements ---------------------------------------------------------------------------------------------------

# Postgres 18 lists NOT NULL as constraints as well; it is read from the columns, as in every version.
_GUARDS = """
SELECT 'trigger' AS kind, relname || '.' || tgname AS name,
    pg_get_triggerdef(pg_trigger.oid, true) || CASE tgenabled WHEN 'O' THEN '' ELSE ' -- disabled' END AS definition
FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
WHERE relnamespace = current_schema()::regnamespace AND NOT relispartition AND NOT tgisinternal
UNION ALL
SELECT 'constraint', relname || '.' || conname, pg_get_constraintdef(pg_constraint.oid, true)
FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid
WHERE relnamespace = current_schema()::regnamespace AND NOT relispartition AND contype IN ('c', 'f', 'p', 'u', 'x')
UNION ALL
SELECT 'column', relname || '.' || attname,
    format_type(atttypid, atttypmod) || CASE WHEN attnotnull THEN ' NOT NULL' ELSE '' END
        || CASE attidentity WHEN 'a' THEN ' GENERATED ALWAYS' ELSE '' END
FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
WHERE relnamespace = current_schema()::regnamespace AND NOT relispartition AND relkind IN ('r', 'p')
    AND attnum > 0 AND NOT attisdropped
UNION ALL
SELECT 'index', its.relname || '.' || pg_class.relname,
    pg_get_indexdef(indexrelid, 0, true) || CASE WHEN indisvalid THEN '' ELSE ' -- invalid' END
FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid JOIN pg_class AS its ON its.oid = indrelid
WHERE indisunique AND pg_class.relnamespace = current_schema()::regnamespace
    AND NOT pg_class.relispartition AND NOT its.relispartition
UNION ALL
SELECT 'function', proname || '(' || pg_get_function_identity_arguments(oid) || ')',
    concat_ws(' ', encode(sha256(convert_to(prosrc, 'UTF8')), 'hex'), CASE WHEN prosecdef THEN 'SECURITY DEFINER' END,
        replace(array_to_string(proconfig, ' '), quote_ident(current_schema()), '(the schema)'))
FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
"""
_TABLES = """
SELECT relname FROM pg_class
WHERE relnamespace = current_schema()::regnamespace AND NOT relispartition AND relkind IN ('r', 'p')
"""
# A partition has a copy of each.
_ROW_TRIGGERS = """
SELECT tgname || ' by ' || proname AS trigger FROM pg_trigger JOIN pg_proc ON pg_proc.oid = tgfoid
WHERE tgrelid = 'transfer'::regclass AND NOT tgisinternal AND tgtype & 1 = 1
"""
_PARTITIONS = """
SELECT relname AS partition, period.state IS NOT DISTINCT FROM 'closed' AS is_closed,
    ARRAY(SELECT tgname || ' by ' || proname || CASE tgenabled WHEN 'O' THEN '' ELSE ' -- disabled' END
        FROM pg_trigger JOIN pg_proc ON pg_proc.oid = tgfoid
        WHERE tgrelid = pg_class.oid AND NOT tgisinternal ORDER BY tgname) AS triggers
FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
LEFT JOIN period ON pg_get_expr(relpartbound, pg_class.oid) = 'FOR VALUES IN (' || quote_literal(period.id) || ')'
WHERE inhparent = 'transfer'::regclass ORDER BY relname
"""
_PRIVILEGES = """
WITH ours AS (
    SELECT oid, relname, relowner, relacl FROM pg_class WHERE relnamespace = current_schema()::regnamespace
        AND relkind IN ('r', 'p') AND (relname = ANY ($1::text[]) OR relispartition)
), granted AS (
    SELECT relname AS name, relowner, (aclexplode(relacl)).* FROM ours
    UNION ALL
    SELECT relname || '.' || attname, relowner, (aclexplode(attacl)).*
    FROM pg_attribute JOIN ours ON ours.oid = attrelid WHERE attnum > 0
)
SELECT DISTINCT coalesce(rolname, 'PUBLIC') AS role, name || '.' || privilege_type AS privilege,
    privilege_type NOT IN ('SELECT', 'REFERENCES', 'MAINTAIN') AS writes
FROM granted LEFT JOIN pg_roles ON pg_roles.oid = grantee WHERE grantee <> relowner
"""
# Functions that run as the owner, but those of triggers, which nobody can call.
_EXECUTES = """
SELECT coalesce(rolname, 'PUBLIC') AS role, name || '.' || privilege_type AS privilege, true AS writes
FROM (
    SELECT proname AS name, proowner, (aclexplode(coalesce(proacl, acldefault('f', proowner)))).* FROM pg_proc
    WHERE pronamespace = current_schema()::regnamespace AND prosecdef AND prorettype <> 'trigger'::regtype
) AS granted LEFT JOIN pg_roles ON pg_roles.oid = grantee WHERE grantee <> proowner
"""
_SWITCHES = """
SELECT name FROM (
    SELECT 'foreign keys of ' || tgrelid::regclass AS name FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
    WHERE relnamespace = current_schema()::regnamespace AND tgisinternal AND tgenabled <> 'O'
    UNION ALL
    SELECT 'rule ' || rulename FROM pg_rewrite JOIN pg_class ON pg_class.oid = ev_class
    WHERE relnamespace = current_schema()::regnamespace AND rulename <> '_RETURN'
    UNION ALL
    SELECT 'row security of ' || relname FROM pg_class
    WHERE relnamespace = current_schema()::regnamespace AND relrowsecurity
    UNION ALL
    SELECT 'setting ' || setting FROM pg_db_role_setting, unnest(setconfig) AS setting
    WHERE setting LIKE 'session_replication_role=%' AND setdatabase IN (0, (
        SELECT oid FROM pg_database WHERE datname = current_database()))
) AS found ORDER BY name LIMIT 1
"""
