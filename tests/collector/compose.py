"""What Docker Compose makes of compose files, by its own library: schema, variables, several files over each
other. Needs Go, no Docker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

LIBRARY = "github.com/compose-spec/compose-go/v2@v2.16.2"
DEADLINE_S = 100
PROGRAM = """
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
)

func main() {
	options, err := cli.NewProjectOptions(os.Args[1:], cli.WithOsEnv, cli.WithResolvedPaths(true), cli.WithProfiles([]string{"*"}))
	if err == nil {
		project, failure := options.LoadProject(context.Background())
		if err = failure; err == nil {
			text, _ := project.MarshalJSON()
			fmt.Println(string(text))
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
"""


class ComposeError(Exception):
    """A file that Docker Compose would refuse."""


class Loader:
    """Loads compose files as `docker compose config` does."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("go") is None:
            message = "compose files are checked by a library in Go, which is not on PATH; install Go >= 1.24 (https://go.dev/dl)"
            pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
        self._program = directory / "loader"
        (directory / "main.go").write_text(PROGRAM)
        for arguments in (
            ["mod", "init", "loader"],
            ["get", LIBRARY],
            ["build", "-mod=mod", "-o", str(self._program), "."],
        ):
            built = subprocess.run(
                ["go", *arguments],
                cwd=directory,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
            assert built.returncode == 0, built.stderr

    def load(self, *files: Path, **variables: str) -> Any:
        """Return the project.

        Raises:
            ComposeError: Compose refuses it.
        """
        environment = {"PATH": os.environ["PATH"], **variables}
        result = subprocess.run(
            [self._program, *files],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        if result.returncode:
            raise ComposeError(result.stderr.strip())
        return json.loads(result.stdout)
