//go:build !amd64 && !(arm64 && linux)

package flush

import "unsafe"

func detect() processor { return processor{} }

func writeBackLines(Method, unsafe.Pointer, uintptr, uintptr) {}

func dropLines(Method, unsafe.Pointer, uintptr, uintptr) {}

func orderStores() {}

func fenceWriteBack() {}

func fenceAll() {}
