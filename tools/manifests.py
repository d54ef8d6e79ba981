"""Write the plain manifests of Kubernetes from the Helm chart: `./dev manifests`."""

import subprocess
import sys
from pathlib import Path

from tools.parts import CannotFetch, fetch

COMPOSE = Path(__file__).parents[1] / "compose"
CHART = COMPOSE / "helm" / "leasehold"
VALUES = COMPOSE / "kubernetes" / "values.yaml"
MANIFESTS = COMPOSE / "kubernetes" / "leasehold.yaml"
KUBERNETES = "1.34"
HEADER = """\
# All of Leasehold in one region, for kubectl. `./dev manifests` writes this file from the chart in compose/helm.
# docs/guides/deployment.md says which Secrets it needs, and that the Job has to end before the Deployments begin.
"""


def rendered(helm: Path, *arguments: str | Path) -> str:
    """Return the manifests that the chart gives with more arguments of `helm template`. Raise CalledProcessError."""
    # A Helm that Go installs does not know the version of Kubernetes that it is for.
    command = [helm / "bin" / "helm", "template", "leasehold", CHART, "--kube-version", KUBERNETES, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def plain_manifests(helm: Path) -> str:
    lines = rendered(helm, "--namespace", "leasehold", "--values", VALUES).splitlines()
    return HEADER + "".join(f"{line.rstrip()}\n" for line in lines if line.strip())


def main() -> int:
    try:
        MANIFESTS.write_text(plain_manifests(fetch("helm")), encoding="utf-8")
    except CannotFetch as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
