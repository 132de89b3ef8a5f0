//go:build !amd64 && !arm64

package directory

func prefetchSlot(*uint64) {}

func prefetchObject(*object) {}

func prefetchHead(*object) {}
