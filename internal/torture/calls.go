package torture

import (
	"context"
	"errors"
	"time"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/node"
)

// ns is a clock reading as a field of a line.
func ns(d time.Duration) uint64 { return uint64(d) } //nolint:gosec // never negative

// load reads keys and checks every byte; it returns the hits.
func (t *thread) load(ctx context.Context, keys []uint32) int {
	items := make([]client.LoadItem, len(keys))
	packed := t.packed(keys)
	for i, k := range keys {
		dst := t.bufs[i][:lengthOf(k, t.w.opt.PageBytes)]
		for at := 0; at < len(dst); at += 512 {
			dst[at] ^= 0xff // what is left of the last load must not pass
		}
		items[i] = client.LoadItem{Key: packed.At(i), Runs: [][]byte{dst}}
	}
	ctx, cancel, begin := t.calling(ctx)
	defer cancel()
	if t.callFailed(ctx, "load", t.w.mu.client.Load(ctx, items, t.codes)) {
		return 0
	}
	end := node.BootTime()
	hits := 0
	for i, k := range keys {
		switch t.codes[i] {
		case base.CodeOK:
			hits++
			t.saw(k, items[i].Runs[0], begin, end, "load", func(c *Counts) { c.Loads++ })
		case base.CodeMiss:
			t.w.say.add(func(c *Counts) { c.Misses++ })
		case base.CodeCorrupt:
			t.w.say.add(func(c *Counts) { c.Corrupt++ })
			t.w.say.wrong("load of key %d: the checksum does not hold under a confirmed lease", k)
		case base.CodeFault:
			t.w.say.add(func(c *Counts) { c.Faults++ })
			t.w.say.wrong("load of key %d: memory of the pool faulted", k)
		default:
			t.w.say.wrong("load of key %d: %v", k, t.codes[i])
		}
	}
	return hits
}

// saw checks bytes that were shown for a key.
func (t *thread) saw(key uint32, b []byte, begin, end time.Duration, how string, count func(*Counts)) generation {
	g, wrong := inspect(b, key)
	if wrong != 0 || len(b) != lengthOf(key, t.w.opt.PageBytes) {
		t.w.say.add(func(c *Counts) { c.WrongBytes += uint64(max(wrong, 1)) }) //nolint:gosec // positive
		t.w.say.wrong("%s of key %d: generation %x, %d bytes instead of %d, %d of them wrong; session %v", how, key, g, len(b),
			lengthOf(key, t.w.opt.PageBytes), wrong, t.w.mu.client.Session())
		return g
	}
	t.w.say.say(count, 'L', uint64(key), uint64(g), ns(begin), ns(end))
	return g
}

// store stores keys and returns how many are there afterwards.
func (t *thread) store(ctx context.Context, keys []uint32) int {
	items := make([]client.StoreItem, len(keys))
	gens := make([]generation, len(keys))
	packed := t.packed(keys)
	for i, k := range keys {
		gens[i] = makeGeneration(t.w.opt.Process, t.w.count.Add(1))
		src := t.bufs[i][:lengthOf(k, t.w.opt.PageBytes)]
		fill(src, k, gens[i], nil)
		items[i] = client.StoreItem{Key: packed.At(i), Runs: [][]byte{src}}
	}
	ctx, cancel, begin := t.calling(ctx)
	defer cancel()
	if t.callFailed(ctx, "store", t.w.mu.client.Store(ctx, items, t.codes)) {
		return 0
	}
	return t.storedAll(keys, gens, begin)
}

// storedAll says what became of stores.
func (t *thread) storedAll(keys []uint32, gens []generation, begin time.Duration) int {
	end, there := node.BootTime(), 0
	for i, k := range keys {
		switch t.codes[i] {
		case base.CodeOK:
			there++
			t.w.say.say(func(c *Counts) { c.Stores++ }, 'S', uint64(k), uint64(gens[i]), ns(begin), ns(end))
		case base.CodeAlreadyStored:
			there++
			t.w.say.add(func(c *Counts) { c.AlreadyStored++ })
		case base.CodeFull:
			t.w.say.add(func(c *Counts) { c.Full++ })
		case base.CodeInvalid, base.CodeFault, base.CodeCorrupt, base.CodeInternal:
			t.w.say.wrong("store of key %d: %v", k, t.codes[i])
		default:
			t.w.say.add(func(c *Counts) { c.StoresFailed++ })
		}
	}
	return there
}

// storeInPlace allocates a page, writes it slowly, and commits it or gives it back.
func (t *thread) storeInPlace(ctx context.Context) {
	k := t.pick(1)
	ctx, cancel, begin := t.calling(ctx)
	defer cancel()
	var page [1]client.Page
	if _, err := t.w.mu.client.Alloc(ctx, 1, page[:]); err != nil {
		if !errors.Is(err, base.ErrFull) {
			t.callFailed(ctx, "alloc", err)
		}
		t.w.say.add(func(c *Counts) { c.Full++ })
		return
	}
	g := makeGeneration(t.w.opt.Process, t.w.count.Add(1))
	n := lengthOf(k[0], t.w.opt.PageBytes)
	nap := time.Duration(0)
	if t.rng.IntN(8) == 0 {
		nap = time.Duration(t.rng.IntN(20)) * time.Millisecond
	}
	fill(page[0].Bytes[:n], k[0], g, func() { time.Sleep(nap) })
	giveBack := func() {
		if err := t.w.mu.client.FreePage(page[0].Region, page[0].Index); err != nil && !errors.Is(err, base.ErrNotFound) {
			t.w.say.wrong("giving page %d of region %d back: %v", page[0].Index, page[0].Region, err)
		}
	}
	if t.rng.IntN(8) == 0 {
		giveBack()
		return
	}
	item := client.CommitItem{Key: t.packed(k).At(0), Region: page[0].Region, Index: page[0].Index, Length: uint64(n)} //nolint:gosec // positive
	if t.callFailed(ctx, "commit", t.w.mu.client.CommitPages(ctx, []client.CommitItem{item}, t.codes)) {
		giveBack() // it was not even begun: this process was stopped past the call's deadline, say
		return
	}
	t.storedAll(k, []generation{g}, begin)
}

func (t *thread) delete(ctx context.Context, keys []uint32) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(1+t.rng.IntN(4))*time.Second)
	defer cancel()
	begin := node.BootTime()
	err := t.w.mu.client.Delete(ctx, t.packed(keys), t.codes)
	end := node.BootTime()
	if err != nil { // nobody said anything about any of them
		t.w.say.add(func(c *Counts) { c.DeletesFailed += uint64(len(keys)) })
		return
	}
	for i, k := range keys {
		if acknowledges(t.codes[i]) {
			t.w.say.say(func(c *Counts) { c.Deletes++ }, 'D', uint64(k), ns(begin), ns(end))
		} else {
			t.w.say.add(func(c *Counts) { c.DeletesFailed++ })
		}
	}
}

// retrieve takes views, checks them, and holds them for a while.
func (t *thread) retrieve(ctx context.Context, keys []uint32) {
	if len(t.views)+len(keys) > maxViews {
		t.releaseView(t.rng.IntN(len(t.views)))
	}
	ctx, cancel, begin := t.calling(ctx)
	defer cancel()
	c := t.w.mu.client
	if t.callFailed(ctx, "retrieve", c.Retrieve(ctx, t.packed(keys), hot.ModeEach, t.out)) {
		return
	}
	end := node.BootTime()
	for i, k := range keys {
		if t.out[i].ID == 0 {
			t.w.say.add(func(c *Counts) { c.Misses++ })
			continue
		}
		g := t.saw(k, t.out[i].Bytes, begin, end, "view", func(c *Counts) { c.Views++ })
		hold := time.Duration(t.rng.IntN(300)) * time.Millisecond
		if t.rng.IntN(20) == 0 {
			hold = time.Duration(t.rng.IntN(8000)) * time.Millisecond
		}
		t.views = append(t.views, heldView{client: c, view: t.out[i], key: k, gen: g, until: time.Now().Add(hold)})
	}
}

// tendViews reads views again and gives those back whose time has come.
func (t *thread) tendViews() {
	for i := 0; i < len(t.views); {
		late := time.Now().After(t.views[i].until)
		if late || t.rng.IntN(4) == 0 {
			t.w.checkView(&t.views[i])
		}
		if late {
			t.releaseView(i)
			continue
		}
		i++
	}
}

func (t *thread) releaseView(i int) {
	v := t.views[i]
	v.client.ReleaseViews([]uint64{v.view.ID})
	last := len(t.views) - 1
	t.views[i] = t.views[last]
	t.views = t.views[:last]
}

func (t *thread) releaseViews() {
	for len(t.views) > 0 {
		t.w.checkView(&t.views[0])
		t.releaseView(0)
	}
}

// pin pins a key, or ends the oldest pin.
func (t *thread) pin(ctx context.Context) {
	ctx, cancel, _ := t.calling(ctx)
	defer cancel()
	if len(t.pins) > 2 {
		t.unpinFirst(ctx)
		return
	}
	keys := t.packed(t.pick(1))
	if !t.callFailed(ctx, "pin", t.w.mu.client.Pin(ctx, keys, hot.ModeEach, t.codes)) && t.codes[0] == base.CodeOK {
		t.w.say.add(func(c *Counts) { c.Pins++ })
		t.pins = append(t.pins, keys.At(0))
	}
}

func (t *thread) unpinFirst(ctx context.Context) {
	keys := hot.AppendKeys(nil, t.pins[:1])
	t.pins = t.pins[1:]
	if !t.callFailed(ctx, "unpin", t.w.mu.client.Unpin(ctx, keys, t.codes)) && t.codes[0] != base.CodeOK {
		t.w.say.wrong("unpin of a pinned key: %v", t.codes[0])
	}
}

func (t *thread) unpin(ctx context.Context) {
	for len(t.pins) > 0 && ctx.Err() == nil {
		t.unpinFirst(ctx)
	}
}
