package core

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
)

// OwnerDigestBytes is the size of what an owner's row keeps of its secret.
const OwnerDigestBytes = sha256.Size

// Claim is who a caller says it is, and the token that shows it.
type Claim struct {
	Owner       base.OwnerID
	Incarnation base.Incarnation
	Token       []byte // of StartOwner's answer
}

// ownerDigest is what the store keeps of a secret: who reads the store cannot act
// as the owner. The secret has 256 random bits, so a plain hash is enough. The
// owner's id is in it, so that equal digests of two owners do not happen.
func ownerDigest(id base.OwnerID, secret base.OwnerSecret) [OwnerDigestBytes]byte {
	b := append([]byte("maru-owner-secret-v1"), id[:]...)
	return sha256.Sum256(append(b, secret.Bytes()...))
}

// ownerToken proves an incarnation. It is derived, not kept: it holds over a
// restart of the resource manager, and a new incarnation has another one.
func (c *Core) ownerToken(o *ownerRow) Token {
	return c.mac("maru-owner-v1", o.ID[:], binary.LittleEndian.AppendUint32(nil, uint32(o.Current.Incarnation)), o.Digest)
}

// prove compares a secret with that of the owner's first start. An owner without
// one on record was started by a version before this rule, or is new: its next
// start sets it. Errors: ErrUnproven.
func (o *owner) prove(secret base.OwnerSecret) (digest []byte, err error) {
	if secret.IsZero() {
		return nil, fmt.Errorf("%w: owner %s: its start shows no secret: use a maru-server of this version or later", base.ErrUnproven, o.row.ID)
	}
	sum := ownerDigest(o.row.ID, secret)
	if len(o.row.Digest) > 0 && subtle.ConstantTimeCompare(o.row.Digest, sum[:]) != 1 {
		return nil, fmt.Errorf("%w: owner %s (%s) was first started with another secret: put the file owner-secret of that server's state directory back, or, "+
			"when it is lost, end that owner with maru rm drop-owner %s --confirm", base.ErrUnproven, o.row.ID, o.row.Name, o.row.ID)
	}
	return sum[:], nil
}

// owned returns the owner if the claim holds. Owners of an older version's store
// have nothing to be proved with before their next start (Unproved counts them).
// Errors: ErrFenced, ErrUnproven.
func (c *Core) owned(who Claim) (*owner, error) {
	o, err := c.current(who.Owner, who.Incarnation)
	if err != nil || len(o.row.Digest) == 0 {
		return o, err
	}
	if want := c.ownerToken(&o.row); !hmac.Equal(who.Token, want[:]) {
		return nil, fmt.Errorf("%w: owner %s (%s): the call does not carry the token that the start of incarnation %d was answered with: "+
			"start that server again in its state directory", base.ErrUnproven, o.row.ID, o.row.Name, who.Incarnation)
	}
	return o, nil
}

// Claim reports whether a claim holds. Errors: ErrFenced, ErrUnproven.
func (c *Core) Claim(who Claim) error {
	_, err := c.owned(who)
	return err
}

// UnprovedCount counts what Unproved lists.
func (c *Core) UnprovedCount() (n int) {
	for _, o := range c.owners {
		if len(o.row.Digest) == 0 {
			n++
		}
	}
	return n
}

// Unproved lists the owners that no secret is on record of, for people.
func (c *Core) Unproved() []base.OwnerID {
	var out []base.OwnerID
	for _, o := range c.ListOwners() {
		if !o.Proved {
			out = append(out, o.ID)
		}
	}
	return out
}
