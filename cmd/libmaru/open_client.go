//go:build !cabifake

package main

import "github.com/xcena-dev/maru/internal/cabi"

var opener cabi.Opener = cabi.OpenClient
