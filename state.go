package edgelimit

import (
	"sync"
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

const (
	kindLimit    = "limit"
	kindCeiling  = "ceiling"
	kindInFlight = "in_flight"
)

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

// counters count the outcomes under one name since the process knows it.
type counters [outcomes]atomic.Uint64

func (c *counters) add(o outcome) { c[o].Add(1) }

func (c *counters) count(o outcome) uint64 { return c[o].Load() }

// limitState is what a limit knows of its keys.
type limitState struct {
	counters
	denials denialLog
	traffic traffic
	pending pendingCharges              // of on_status
	ledger  atomic.Pointer[ledger]      // in the numbers of the configuration that runs, or ran last
	opening sync.Mutex                  // of a ledger
	denied  atomic.Pointer[table.Table] // until when a shared store's denial of a key holds
}

// deniedKeys are the keys that a shared store has denied, and until when.
func (s *limitState) deniedKeys(maxKeys int) *table.Table {
	if denied := s.denied.Load(); denied != nil {
		return denied
	}
	s.denied.CompareAndSwap(nil, table.New(maxKeys))
	return s.deniedKeys(maxKeys)
}

// ceilingState is what a ceiling has admitted.
type ceilingState struct {
	counters
	denials denialLog
	window  *slidingCount
	lease   lease // of a store's ceiling
	inForce atomic.Pointer[rate]
}

// inFlightState is what runs at the moment.
type inFlightState struct {
	counters
	denials denialLog
	running running
}

// Destruct implements caddy.Destructor; the garbage collector does the rest.
func (*limitState) Destruct() error { return nil }

// Destruct implements caddy.Destructor; the garbage collector does the rest.
func (*ceilingState) Destruct() error { return nil }

// Destruct implements caddy.Destructor; the garbage collector does the rest.
func (*inFlightState) Destruct() error { return nil }

// takeState returns the state known by key, as another configuration left it, or
// a new one. It must be released once.
func takeState[T caddy.Destructor](key stateKey, create func() T) (T, error) {
	state, _, err := states.LoadOrNew(key, func() (caddy.Destructor, error) { return create(), nil })
	if err != nil {
		var none T
		return none, err
	}
	return state.(T), nil
}

func releaseState(key stateKey) { _, _ = states.Delete(key) }

func newLimitState(numbers limitNumbers) *limitState {
	s := new(limitState)
	s.ledger.Store(newLedger(numbers))
	return s
}

func newCeilingState(r rate) *ceilingState {
	s := &ceilingState{window: newSlidingCount(r)}
	s.inForce.Store(&r)
	return s
}

// adopt puts this ceiling's numbers in force if its configuration is the one that
// runs: not before, for the new one may fail.
func (c *Ceiling) adopt(now int64) {
	if s := c.state; *s.inForce.Load() != c.rate && c.app.running() {
		s.window.adopt(c.rate, now)
		s.inForce.Store(&c.rate)
	}
}

// running says whether this app's configuration is the one that runs.
func (a *App) running() bool {
	active, err := caddy.ActiveContext().AppIfConfigured(appName)
	return err == nil && active == a
}
