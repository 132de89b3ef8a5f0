package server

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/settings"
)

// secretFile holds what this server proves its id with at the resource manager: 256
// random bits in hexadecimal digits, mode 0600. It is written once and never again.
const secretFile = "owner-secret"

// openSecret reads the secret beside server.json or, for an id that has none yet,
// makes it. The check in server.json tells an id that never had one (new, or made by
// an older version) from one that lost it: a new secret for an old id would only be
// refused by the resource manager. A secret without server.json is of a start that
// was cut short, or of an id that was given up; it serves the new id as well, since
// the resource manager keeps a digest over both. Errors: ErrNotFound (lost),
// ErrForeign (of another id), ErrCorrupt, ErrDenied (mode, owner, directory), ErrFull.
func openSecret(dir string, r stateRecord) (base.OwnerSecret, string, error) {
	path := filepath.Join(dir, secretFile)
	content, err := settings.ReadSecretFile(path)
	switch {
	case errors.Is(err, base.ErrNotFound) && r.SecretCheck == "":
		secret := base.NewOwnerSecret()
		return secret, secretCheck(secret), replaceFile(dir, secretFile, []byte(secret.EncodeHex()+"\n"))
	case errors.Is(err, base.ErrNotFound):
		return base.OwnerSecret{}, "", fmt.Errorf("%w: %s, which server %s proves itself with, is missing: %s", base.ErrNotFound, path, r.ServerID, secretCure(r.ServerID))
	case errors.Is(err, base.ErrDenied):
		return base.OwnerSecret{}, "", err // it names the cure
	case err != nil:
		return base.OwnerSecret{}, "", fmt.Errorf("%w: %w: %s", base.ErrCorrupt, err, secretCure(r.ServerID))
	}
	secret, err := base.DecodeOwnerSecret(string(content))
	if err != nil {
		return base.OwnerSecret{}, "", fmt.Errorf("%w: %s: %w: %s", base.ErrCorrupt, path, err, secretCure(r.ServerID))
	}
	check := secretCheck(secret)
	if r.SecretCheck != "" && r.SecretCheck != check {
		return base.OwnerSecret{}, "", fmt.Errorf("%w: %s is not the secret of server %s: %s", base.ErrForeign, path, r.ServerID, secretCure(r.ServerID))
	}
	return secret, check, nil
}

// secretCheck tells whether a secret is the right one and tells nothing about it, nor
// about the digest that the resource manager keeps.
func secretCheck(s base.OwnerSecret) string {
	sum := sha256.Sum256(append([]byte("maru-server-secret-check-v1"), s.Bytes()...))
	return hex.EncodeToString(sum[:])
}

func secretCure(id string) string {
	return fmt.Sprintf("put the right one back, or, when it is lost, remove %s and %s to start as a new server, and end the old one at the resource manager: "+
		"maru rm drop-owner %s --confirm", stateFile, secretFile, id)
}

// unprovenCure is for a server that the resource manager does not take for its owner:
// the id was first started with another secret.
func unprovenCure(s *stateDir) string {
	return fmt.Sprintf("put the %s and %s that server %s was made with back into %s; when they are lost, maru rm drop-owner %s --confirm: "+
		"its regions go back, and this server goes on by itself", stateFile, secretFile, s.server, s.path, s.server)
}
