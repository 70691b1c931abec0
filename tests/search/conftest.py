import shutil
from pathlib import Path

import pytest

from easerve.search.storage import open_storage


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without a study, which takes longer to make than to copy."""
    path = tmp_path_factory.mktemp("empty") / "study.db"
    open_storage(path)
    return path


@pytest.fixture
def path(empty: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(empty, tmp_path))
