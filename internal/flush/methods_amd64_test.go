package flush

import "testing"

func TestMethods(t *testing.T) {
	const line = 8 << 8
	for _, c := range []struct {
		b1, d1, b7 uint32
		want       processor
	}{
		{line, 0, hasClwb, processor{}},
		{line, hasClflush, 0, processor{Clflush, Clflush, 64}},
		{line, hasClflush, hasClflushOpt, processor{ClflushOpt, ClflushOpt, 64}},
		{line, hasClflush, hasClflushOpt | hasClwb, processor{Clwb, ClflushOpt, 64}},
		{line, hasClflush, hasClwb, processor{Clwb, Clflush, 64}},
	} {
		if got := methods(c.b1, c.d1, c.b7); got != c.want {
			t.Errorf("%#x %#x %#x: %+v, want %+v", c.b1, c.d1, c.b7, got, c.want)
		}
	}
	if methods(0, hasClflush, 0).supported() {
		t.Error("a processor without a line size is supported")
	}
}
