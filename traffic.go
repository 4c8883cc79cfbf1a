package edgelimit

import (
	"math/rand/v2"
	"sync/atomic"

	"github.com/edgelimit/caddy-edgelimit/internal/topkeys"
)

// traffic follows which keys make up most of a limit's requests. One key that
// dominates is how a wrong key looks: a proxy's address, or everybody unresolved.
type traffic struct {
	sketch topkeys.Sketch
	seen   atomic.Uint32 // the first observeAll requests
}

const (
	observeAll      = 1024 // so many requests are all looked at, so that small traffic is seen too
	observeOneIn    = 16   // of those after
	dominatingShare = 0.5
)

// observe follows a request's key, or one in some when there are many. It says
// now and then that there is enough to look at.
func (t *traffic) observe(key uint64) (lookNow bool) {
	if t.seen.Load() < observeAll {
		t.seen.Add(1)
	} else if rand.Uint32N(observeOneIn) != 0 {
		return false
	}
	return t.sketch.Observe(key)%observeAll == 0
}
