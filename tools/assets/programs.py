"""The programs that can be installed: their versions, download addresses and Go packages."""

from __future__ import annotations

from dataclasses import dataclass

# Renovate reads these lines (renovate.json): a version, and the Go module to which it belongs.
KUBERNETES = "1.34.4"  # k8s.io/kubernetes
ETCD = "3.6.5"  # go.etcd.io/etcd/server/v3
KWOK = "0.8.0"  # sigs.k8s.io/kwok
HELM = "3.22.0"  # helm.sh/helm/v3
KIND = "0.33.0"  # sigs.k8s.io/kind
ACTIONLINT = "1.7.12"  # github.com/rhysd/actionlint
KUEUE = "0.19.0"  # sigs.k8s.io/kueue
SCHEDULER_PLUGINS = "0.34.7"  # sigs.k8s.io/scheduler-plugins

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""The architectures with pinned downloads: the kernel's name, and the upstream projects' name."""


class AssetError(Exception):
    """A program cannot be installed; the message lists what was tried and says what to do next."""


class MissingError(AssetError):
    """A program is not installed and cannot be installed by this tool."""


@dataclass(frozen=True)
class Program:
    """A program that can be installed, with its accepted versions and its sources.

    Attributes
    ----------
    version : str
        The version that is downloaded or built.
    precision : int
        The number of leading version components that an installed program must have in common with `version`.
    ask : tuple of str
        The arguments with which the program prints its version. If empty, the version is that of `go_module`
        in the build information that Go writes into programs.
    download : str
        The URL of the official file, with placeholders ``{version}`` and ``{arch}``; empty if there is none.
    package : str
        The Go package; with its version if it is built with its own go.mod.
    member : str, optional
        The program's path inside the official file, if that is a tar.gz; with placeholders as in `download`.
    module : str, optional
        The folder in ``tools/go`` with the go.mod for the build.
    flags : str
        Linker flags in addition to ``-s -w``.
    go_module : str
        The Go module whose version is compared, for a program without `ask`.
    by_name : bool
        True to install the program only on request, because its build is slow and few tests start it.
    minutes : float
        The build time on two cores from an empty cache, in the order of `PROGRAMS`; not a limit.
    """

    version: str
    precision: int
    ask: tuple[str, ...]
    download: str
    package: str
    member: str | None = None
    module: str | None = None
    flags: str = ""
    go_module: str = ""
    by_name: bool = False
    minutes: float = 0.5

    def url(self, arch: str) -> str:
        """Return the URL of the program's official file for an architecture."""
        return self.download.format(version=self.version, arch=arch)

    def path_inside(self, arch: str) -> str | None:
        """Return the program's path inside its archive, or None if the file is not an archive."""
        return self.member and self.member.format(version=self.version, arch=arch)

    @property
    def wanted(self) -> str:
        """The leading components of the version, which an installed program's version must share."""
        return ".".join(self.version.split(".")[: self.precision])


def _kubernetes_flags() -> str:
    """Return linker flags that set the version reported by kubectl and by the API server."""
    major, minor, _ = KUBERNETES.split(".")
    stamps = {
        "gitVersion": f"v{KUBERNETES}",
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
        "gitCommit": "from-modules",
        "buildDate": "1970-01-01T00:00:00Z",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return " ".join(f"-X {package}.{name}={value}" for package in packages for name, value in stamps.items())


def _kubernetes(name: str, minutes: float, *ask: str) -> Program:
    return Program(
        KUBERNETES,
        2,
        ask,
        f"https://dl.k8s.io/release/v{{version}}/bin/linux/{{arch}}/{name}",
        f"k8s.io/kubernetes/cmd/{name}",
        module="k8s",
        flags=_kubernetes_flags(),
        minutes=minutes,
    )


PROGRAMS: dict[str, Program] = {
    "etcd": Program(
        ETCD,
        2,
        ("--version",),
        "https://github.com/etcd-io/etcd/releases/download/v{version}/etcd-v{version}-linux-{arch}.tar.gz",
        "go.etcd.io/etcd/server/v3",
        member="etcd-v{version}-linux-{arch}/etcd",
        module="etcd",
        minutes=1,
    ),
    "kube-apiserver": _kubernetes("kube-apiserver", 7, "--version"),
    "kube-controller-manager": _kubernetes("kube-controller-manager", 2, "--version"),
    "kube-scheduler": _kubernetes("kube-scheduler", 0.1, "--version"),
    "kubectl": _kubernetes("kubectl", 0.4, "version", "--client"),
    "kwok": Program(
        KWOK,
        2,
        ("--version",),
        "https://github.com/kubernetes-sigs/kwok/releases/download/v{version}/kwok-linux-{arch}",
        f"sigs.k8s.io/kwok/cmd/kwok@v{KWOK}",
        minutes=7.5,
    ),
    "helm": Program(
        HELM,
        1,
        ("version", "--short"),
        "https://get.helm.sh/helm-v{version}-linux-{arch}.tar.gz",
        f"helm.sh/helm/v3/cmd/helm@v{HELM}",
        member="linux-{arch}/helm",
        flags=f"-X helm.sh/helm/v3/internal/version.version=v{HELM}",
        minutes=7.5,
    ),
    "kind": Program(
        KIND,
        1,
        ("version",),
        "https://github.com/kubernetes-sigs/kind/releases/download/v{version}/kind-linux-{arch}",
        f"sigs.k8s.io/kind@v{KIND}",
    ),
    "actionlint": Program(
        ACTIONLINT,
        2,
        ("-version",),
        "https://github.com/rhysd/actionlint/releases/download/v{version}/actionlint_{version}_linux_{arch}.tar.gz",
        f"github.com/rhysd/actionlint/cmd/actionlint@v{ACTIONLINT}",
        member="actionlint",
    ),
    "kueue": Program(
        KUEUE,
        2,
        (),
        "",  # published as an image only
        f"sigs.k8s.io/kueue/cmd/kueue@v{KUEUE}",
        go_module="sigs.k8s.io/kueue",
        by_name=True,
        minutes=15,
    ),
    "coscheduling": Program(
        SCHEDULER_PLUGINS,
        2,
        (),
        "",
        "fleetjob.dev/tools/coscheduling",
        module="coscheduling",
        go_module="sigs.k8s.io/scheduler-plugins",
        by_name=True,
        minutes=3,
    ),
}

USUAL = tuple(name for name, each in PROGRAMS.items() if not each.by_name)
"""The programs that are installed by default."""


def program(name: str) -> Program:
    """Return the program with the given name; raise `AssetError` for an unknown name."""
    if name not in PROGRAMS:
        raise AssetError(f"no such program: {name}; there are {', '.join(sorted(PROGRAMS))}")
    return PROGRAMS[name]
