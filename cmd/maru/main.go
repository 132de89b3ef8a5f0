// Command maru is the tool of operators and newcomers. See internal/cli.
package main

import (
	"os"

	"github.com/xcena-dev/maru/internal/cli"
)

// version is set by the build.
var version = "dev"

func main() { os.Exit(cli.Main(version, os.Args[1:])) }
