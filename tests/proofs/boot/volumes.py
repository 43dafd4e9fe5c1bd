"""The volumes of a pod as folders, with the owners and modes that the kubelet gives them.

Files of Secrets and ConfigMaps lie behind the symlink `..data`, as the kubelet writes them.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.render import Manifest
from tests.proofs.boot.environment import PodFacts, amount
from tests.proofs.boot.objects import NoSuchObject, Objects

_DATA = "..data"
_SHARED_MODE = 0o777

# Makes a folder that holds at most so many bytes (None: no bound).
MakeFolder = Callable[[Path, float | None], None]


@dataclass(frozen=True, slots=True)
class Mount:
    source: Path
    destination: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    mode: int


class Volumes:
    """All volumes of one pod. Raises NoSuchObject for missing objects."""

    def __init__(
        self, spec: Manifest, pod: PodFacts, objects: Objects, folder: Path, claims: Path, empty: MakeFolder
    ) -> None:
        """`folder` is the pod's own; `claims` outlives pods; `empty` makes an emptyDir."""
        self._pod, self._objects, self._folder, self._claims = pod, objects, folder, claims
        self._empty = empty
        self._group = (spec.get("securityContext") or {}).get("fsGroup")
        self._volumes = {volume["name"]: volume for volume in spec.get("volumes") or []}

    def make(self) -> None:
        for name, volume in self._volumes.items():
            self._make(name, volume)

    def mounts(self, container: Manifest) -> list[Mount]:
        return [self._mount(mount) for mount in container.get("volumeMounts") or []]

    def _mount(self, mount: Manifest) -> Mount:
        name = mount["name"]
        if name not in self._volumes:
            raise NoSuchObject(f"volumeMounts: no volume {name!r}")
        source = self._path(name)
        if mount.get("subPath"):
            source = source / mount["subPath"]
            if not source.exists():
                source.mkdir(parents=True)
                self._share(source)
        read_only = bool(mount.get("readOnly")) or _has_files(self._volumes[name])
        return Mount(source, mount["mountPath"], read_only)

    def _path(self, name: str) -> Path:
        claim = self._volumes[name].get("persistentVolumeClaim")
        return self._folder / name if claim is None else self._claims / claim["claimName"]

    def _make(self, name: str, volume: Manifest) -> None:
        path = self._path(name)
        if _has_files(volume):
            path.mkdir(parents=True)
            self._write_files(path, self._files_of(volume))
        elif "emptyDir" in volume:
            limit = (volume["emptyDir"] or {}).get("sizeLimit")
            self._empty(path, None if limit is None else amount(limit))
            self._share(path)
        elif "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            if self._objects.find("PersistentVolumeClaim", self._pod.namespace, claim) is None:
                raise NoSuchObject(f"volume {name}: no claim {claim!r}")
            path.mkdir(parents=True, exist_ok=True)
            self._share(path)
        else:
            raise NoSuchObject(f"volume {name}: {sorted(set(volume) - {'name'})} cannot be made here")

    def _share(self, path: Path) -> None:
        """Give the folder the pod's group (fsGroup), as the kubelet does for writable volumes."""
        path.chmod(_SHARED_MODE)
        if self._group is None or os.geteuid() != 0:
            return
        for folder, _, files in os.walk(path):
            self._hand_over(Path(folder), stat.S_ISGID | 0o770)
            for file in files:
                self._hand_over(Path(folder, file), 0o660)

    def _hand_over(self, path: Path, mode: int) -> None:
        os.lchown(path, -1, int(self._group or 0))
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | mode)

    def _write_files(self, path: Path, files: dict[str, _File]) -> None:
        fresh = path / f"..{uuid.uuid4().hex}"
        for name, file in files.items():
            target = fresh / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.content)
            target.chmod(file.mode)
            if self._group is not None and os.geteuid() == 0:
                self._hand_over(target, 0o440)
        fresh.mkdir(exist_ok=True)
        (path / _DATA).symlink_to(fresh.name)
        for name in {Path(name).parts[0] for name in files}:
            (path / name).symlink_to(f"{_DATA}/{name}")

    def _files_of(self, volume: Manifest) -> dict[str, _File]:
        if "projected" in volume:
            projected = volume["projected"]
            mode = projected.get("defaultMode", 0o644)
            result: dict[str, _File] = {}
            for source in projected["sources"]:
                result |= dict(self._of_source(source, mode))
            return result
        (kind,) = set(volume) & {"secret", "configMap", "downwardAPI"}
        return dict(self._of_source({kind: volume[kind]}, volume[kind].get("defaultMode", 0o644)))

    def _of_source(self, source: Manifest, mode: int) -> Iterator[tuple[str, _File]]:
        (kind,) = source
        spec = source[kind]
        if kind == "downwardAPI":
            for item in spec["items"]:
                value = self._pod.field(item["fieldRef"]["fieldPath"])
                yield item["path"], _File(value.encode(), item.get("mode", mode))
            return
        if kind not in ("secret", "configMap"):
            raise NoSuchObject(f"projected volume: {kind} cannot be made here")
        name = spec.get("secretName") or spec["name"]
        object_kind = "Secret" if kind == "secret" else "ConfigMap"
        data = self._objects.data(object_kind, self._pod.namespace, name)
        if data is None:
            if spec.get("optional"):
                return
            raise NoSuchObject(f"{object_kind} {name}: there is none")
        items = spec.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            if item["key"] not in data:
                raise NoSuchObject(f"{object_kind} {name}: no key {item['key']!r}")
            yield item["path"], _File(data[item["key"]], item.get("mode", mode))


def _has_files(volume: Manifest) -> bool:
    return any(kind in volume for kind in ("secret", "configMap", "projected", "downwardAPI"))
