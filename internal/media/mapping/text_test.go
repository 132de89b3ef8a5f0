package mapping

import "strconv"

func itoa(n int) string    { return strconv.Itoa(n) }
func hex(n uintptr) string { return strconv.FormatUint(uint64(n), 16) }
