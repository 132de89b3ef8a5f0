package sim

import "testing"

func TestSmoke(t *testing.T) {
	for seed := uint64(1); seed <= 20; seed++ {
		r, err := Run(Options{Seed: seed})
		if err != nil {
			t.Errorf("%v", err)
			continue
		}
		t.Logf("%+v", r)
	}
}
