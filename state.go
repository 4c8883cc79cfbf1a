package edgelimit

import (
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"

	"github.com/edgelimit/caddy-edgelimit/internal/table"
)

// State outlives the configuration: a reload finds the budgets as they were
// used. It holds times and counts, never configuration, and is released only by
// who took it, so that a configuration which fails to load leaves it alone.
var states = caddy.NewUsagePool()

// stateKey is what a budget is known by across configurations.
type stateKey struct{ kind, name string }

// outcome is what became of a request under one name.
type outcome uint8

const (
	outcomeAllowed outcome = iota
	outcomeDenied
	outcomeWouldDeny
	outcomeExempt
	outcomes
)

var outcomeNames = [outcomes]string{"allowed", "denied", "would_deny", "exempt"}

// counters count the outcomes under one name since the process started to know
// it.
type counters [outcomes]atomic.Uint64

func (c *counters) add(o outcome) { c[o].Add(1) }

func (c *counters) count(o outcome) uint64 { return c[o].Load() }

// limitState is what a limit knows of its keys.
type limitState struct {
	counters
	buckets *table.Table
}

// ceilingState is what a ceiling has admitted.
type ceilingState struct {
	counters
	window slidingCount
}

// Destruct implements caddy.Destructor; the garbage collector does the rest.
func (*limitState) Destruct() error { return nil }

// Destruct implements caddy.Destructor; the garbage collector does the rest.
func (*ceilingState) Destruct() error { return nil }

// takeLimitState returns the state of the limit of that name, new or as another
// configuration left it. It must be released once.
func takeLimitState(name string, maxKeys int) (*limitState, stateKey, error) {
	key := stateKey{"limit", name}
	state, _, err := states.LoadOrNew(key, func() (caddy.Destructor, error) {
		return &limitState{buckets: table.New(maxKeys)}, nil
	})
	if err != nil {
		return nil, key, err
	}
	return state.(*limitState), key, nil
}

// takeCeilingState does the same for a ceiling. The numbers are part of its
// identity: what was admitted under other numbers says nothing about these.
func takeCeilingState(name string, r rate) (*ceilingState, stateKey, error) {
	key := stateKey{"ceiling", name + " " + r.String()}
	state, _, err := states.LoadOrNew(key, func() (caddy.Destructor, error) {
		s := &ceilingState{}
		s.window.reset(r)
		return s, nil
	})
	if err != nil {
		return nil, key, err
	}
	return state.(*ceilingState), key, nil
}

func releaseState(key stateKey) { _, _ = states.Delete(key) }
