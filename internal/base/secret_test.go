package base

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
)

// However it is printed, alone or inside something, a secret does not show.
func TestOwnerSecretIsNotShown(t *testing.T) {
	s := NewOwnerSecret()
	if s.Equal(NewOwnerSecret()) || !s.Equal(s) || s.IsZero() || (OwnerSecret{}).Equal(OwnerSecret{}) {
		t.Fatal("two secrets are equal")
	}
	holder := struct {
		ID      OwnerID
		Secret  OwnerSecret
		Secrets []OwnerSecret
		Inside  *struct{ Secret OwnerSecret }
		secret  OwnerSecret
	}{Secret: s, Secrets: []OwnerSecret{s}, Inside: &struct{ Secret OwnerSecret }{s}, secret: s}
	var all strings.Builder
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "% x"} {
		_, _ = fmt.Fprintf(&all, verb+" "+verb+" "+verb+"\n", s, &s, holder)
	}
	b, err := json.Marshal(map[string]any{"a": s, "b": holder})
	if err != nil {
		t.Fatal(err)
	}
	all.Write(b)
	for _, form := range []string{s.EncodeHex(), strings.ToUpper(s.EncodeHex()), fmt.Sprint(s.Bytes()[:4])[1:8], string(s.Bytes())} {
		if strings.Contains(all.String(), form) {
			t.Errorf("shown as %q", form)
		}
	}
	if got, err := DecodeOwnerSecret(s.EncodeHex()); err != nil || !got.Equal(s) {
		t.Errorf("comes back as another one: %v", err)
	}
	for _, bad := range []string{"", "00", s.EncodeHex()[1:], s.EncodeHex() + "0", "zz" + s.EncodeHex()[2:]} {
		if _, err := DecodeOwnerSecret(bad); !errors.Is(err, ErrInvalid) || len(bad) > 8 && strings.Contains(err.Error(), bad[2:10]) {
			t.Errorf("%d characters: %v", len(bad), err)
		}
	}
}
