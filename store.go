package edgelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func init() {
	caddy.RegisterModule(MemoryStore{})
}

// Store is what a module of the namespace `edge_limit.stores` is: it says where
// budgets are kept.
type Store interface {
	// Shared describes the store that instances share. It is nil where each
	// instance keeps its own budgets.
	Shared() *SharedStore
}

// MemoryStore keeps the budgets in this process, which is the default: each
// instance has its own.
type MemoryStore struct{}

// CaddyModule returns the Caddy module information.
func (MemoryStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "edge_limit.stores.memory",
		New: func() caddy.Module { return new(MemoryStore) },
	}
}

// Shared implements Store.
func (MemoryStore) Shared() *SharedStore { return nil }

// UnmarshalCaddyfile parses the line. Syntax:
//
//	store memory
func (MemoryStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the module's name
	if d.NextArg() {
		return d.Errf("unexpected argument %q: store memory takes none", d.Val())
	}
	if d.NextBlock(d.Nesting()) {
		return d.Err("store memory takes no block")
	}
	return nil
}

// SharedStore describes a store that instances share.
type SharedStore struct {
	SharedOptions

	// ID tells one store from another. As long as it stays the same over a reload
	// the connections do too. It may hold secrets: it is never shown.
	ID string

	// Dial connects. It is called in the background, again after it has failed,
	// and never before the configuration has started.
	Dial func(context.Context) (StoreConn, error)
}

// SharedOptions are what every shared store has.
type SharedOptions struct {
	// The most that a request can wait for the store. Default: 50ms.
	Timeout caddy.Duration `json:"timeout,omitempty"`

	// What holds while the store cannot be asked: `local` (each instance allows
	// its share, the budget divided by the number of instances), `local_full`
	// (each allows the whole budget), `open` (all is allowed) or `closed` (what
	// needs the store is denied). Default: `local`.
	OnFailure string `json:"on_failure,omitempty"`

	// The least number of instances that shares are cut for. Default: 1, or as
	// many as were seen.
	Fleet int `json:"fleet,omitempty"`
}

// The values of the option on_failure.
const (
	onFailureLocal     = "local"
	onFailureLocalFull = "local_full"
	onFailureOpen      = "open"
	onFailureClosed    = "closed"
)

const (
	defaultStoreTimeout = 50 * time.Millisecond
	minStoreTimeout     = time.Millisecond
	maxStoreTimeout     = 10 * time.Second
	maxFleet            = 10_000
)

// Validate checks the options.
func (o *SharedOptions) Validate() error {
	switch o.OnFailure {
	case "", onFailureLocal, onFailureLocalFull, onFailureOpen, onFailureClosed:
	default:
		return fmt.Errorf("on_failure %q: must be local, local_full, open or closed", o.OnFailure)
	}
	if timeout := time.Duration(o.Timeout); timeout != 0 && (timeout < minStoreTimeout || timeout > maxStoreTimeout) {
		return fmt.Errorf("timeout %s: must be from %s to %s", timeout, minStoreTimeout, maxStoreTimeout)
	}
	if o.Fleet < 0 || o.Fleet > maxFleet {
		return fmt.Errorf("fleet %d: must be from 1 to %d", o.Fleet, maxFleet)
	}
	return nil
}

// UnmarshalOption parses the line that the dispenser stands on. known says
// whether it is one of these options.
func (o *SharedOptions) UnmarshalOption(d *caddyfile.Dispenser) (known bool, err error) {
	b := block{Dispenser: d}
	switch d.Val() {
	case "timeout":
		err = b.argument("a duration, for example 50ms", func(text string) error {
			timeout, err := caddy.ParseDuration(text)
			if err != nil {
				return fmt.Errorf("%q is no duration: write for example 50ms", text)
			}
			if timeout <= 0 {
				return fmt.Errorf("%q: must be more than nothing", text)
			}
			o.Timeout = caddy.Duration(timeout)
			return nil
		})
	case "on_failure":
		err = b.word(&o.OnFailure, "local, local_full, open or closed")
	case "fleet":
		err = b.number(&o.Fleet, 1, maxFleet)
	default:
		return false, nil
	}
	if err == nil {
		err = o.Validate()
	}
	return true, place(d, err)
}

// StoreConn is a connected store. Its clock alone counts, so that instances
// agree whatever theirs say. All methods may be called at the same time, and
// keep to the context's deadline. An error other than a [StoreError] of the kind
// stale leaves unknown whether the call had its effect.
//
// Keys are keyed hashes: what a key was made of never gets here.
type StoreConn interface {
	// Take charges a request, all or nothing, and says in each charge what became
	// of it.
	Take(context.Context, []StoreCharge) error

	// GiveBack undoes charges that Take made, as far as they have not decayed, and
	// says how each key stands then.
	GiveBack(context.Context, []StoreCharge) error

	// Renew says that the requests of these charges of in_flights still run.
	Renew(context.Context, []StoreCharge) error

	// Forget drops the debt and the ban of a limit's key, and says whether there
	// was any.
	Forget(context.Context, StoreKey) (bool, error)

	// Lease hands out a part of a ceiling.
	Lease(context.Context, LeaseRequest) (Lease, error)

	// Beat says that the instance is there for as long as ttl, or with 0 that it
	// goes.
	Beat(ctx context.Context, beat Beat) (Pulse, error)

	// Check looks for settings of the store that would harm limits. It is called
	// when the store has become usable.
	Check(context.Context) (warnings []string, err error)

	// Close ends the connections.
	Close()
}

// StoreKey names a budget in the store.
type StoreKey struct {
	Kind StoreKind
	Hash [16]byte // HMAC-SHA256 by the pepper, of the budget's name and the key
}

// StoreKind tells budgets of different arithmetic apart.
type StoreKind byte

// The kinds of budget.
const (
	StoreLimit    StoreKind = 'l'
	StoreInFlight StoreKind = 'f'
	StoreCeiling  StoreKind = 'c'
)

// StoreCharge is one budget that a request counts against in a store.
type StoreCharge struct {
	Key StoreKey

	// Of a limit: GCRA with this increment and tolerance.
	Increment time.Duration
	Tolerance time.Duration
	Ban       time.Duration // how long a denial bans; 0: it does not
	Extend    bool          // the ban counts from the last denial
	Returns   bool          // may be given back long after: its place in the queue is remembered
	Peek      bool          // charge nothing, only say whether it would pass
	Late      bool          // charged with the response: no ban counts, and none begins
	Look      bool          // change nothing at all, not even by a ban

	// Of an in_flight.
	Max int64
	TTL time.Duration // after which a request that nobody renews is gone

	Observe bool   // would it deny, it is not charged and denies nothing
	ID      string // tells this charge from all others of the fleet

	// The answer.
	Denied  bool          // this one denies the request, or would
	Debt    time.Duration // how far the key's TAT lies ahead
	Wait    time.Duration // until it would pass; 0: nobody knows
	BanLeft time.Duration // how long the key's ban lasts
	TAT     int64         // after this charge, on the store's clock in microseconds
}

// LeaseRequest asks for permits of a ceiling. The window is cut into slots;
// permits hold within one slot, and any Slots+1 slots in a row have no more than
// Count, which bounds every window of time, wherever it starts.
type LeaseRequest struct {
	Key   StoreKey
	Count int64         // of the ceiling, in a window
	Slot  time.Duration // the length of one
	Slots int64         // in a window
	Want  int64
	Spent int64 // admitted without the store since the last lease

	// A lease that is over, of which so many were not used.
	Over   int64
	Unused int64
}

// Lease is what was granted.
type Lease struct {
	Slot    int64 // its number
	Granted int64
	Left    time.Duration // of the slot, counted from a moment in the call
	Used    int64         // granted in the window, to all
	Wait    time.Duration // where nothing was granted: until something can be
}

// Beat is what an instance tells when it shows that it is there.
type Beat struct {
	Instance string
	TTL      time.Duration
	Pepper   string // a check of the pepper, from which nothing can be learned about it
}

// Pulse is what it learns.
type Pulse struct {
	Instances   int  // that are there
	OtherPepper bool // the store is in use with another pepper
}

// StoreError says why the store could not be asked, in one of the words of
// [StoreErrorKinds].
type StoreError struct {
	Kind   string
	Advice string // what to do about it; may be empty
	Err    error
}

func (e *StoreError) Error() string {
	if e.Advice == "" {
		return e.Err.Error()
	}
	return fmt.Sprintf("%v: %s", e.Err, e.Advice)
}

func (e *StoreError) Unwrap() error { return e.Err }

// Kinds of errors, and states of a store.
const (
	StoreTimeout     = "timeout"       // no answer in time
	StoreNetwork     = "network"       // no connection
	StoreTLS         = "tls"           // certificates do not fit, or only one side speaks TLS
	StoreAuth        = "auth"          // a wrong password, or rights are missing
	StoreNotRedis    = "not_redis"     // something else answers
	StoreCluster     = "cluster"       // a node of a cluster that was given as a single server
	StoreReadOnly    = "read_only"     // a replica
	StoreMemory      = "out_of_memory" // it takes nothing more
	StoreUnavailable = "unavailable"   // it says that it cannot serve now: loading, failing over
	StoreStale       = "stale"         // the call came too late and had no effect
	StoreOverload    = "overload"      // too many calls are under way
	StorePepper      = "other_pepper"  // in use with another pepper
	StoreGarbage     = "garbage"       // a value that is not ours was found, and clamped
	StoreOther       = "other"
)

// failedStates are what keeps a store from being used.
var failedStates = []string{
	StoreTimeout, StoreNetwork, StoreTLS, StoreAuth, StoreNotRedis, StoreCluster, StoreReadOnly, StoreMemory,
	StoreUnavailable, StoreStale, StorePepper, StoreOther,
}

// storeStates are what a store can be in.
var storeStates = slices.Concat([]string{stateConnected, stateConnecting}, failedStates)

// StoreErrorKinds are all kinds of errors: the last two are of one call.
var StoreErrorKinds = slices.Concat(failedStates, []string{StoreOverload, StoreGarbage})

// storeErrorKind is the kind of an error of a store.
func storeErrorKind(err error) string {
	var storeErr *StoreError
	switch {
	case errors.As(err, &storeErr):
		return storeErr.Kind
	case errors.Is(err, context.DeadlineExceeded):
		return StoreTimeout
	}
	return StoreOther
}

// CountGarbage counts a value in the store that is not ours.
func CountGarbage(n int) { countStoreErrors(StoreGarbage, n) }

// loadStore loads the module of the option store. It is nil without one that is
// shared.
func (a *App) loadStore(ctx caddy.Context) (*SharedStore, error) {
	if a.StoreRaw == nil {
		return nil, nil
	}
	loaded, err := ctx.LoadModule(a, "StoreRaw")
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	store, ok := loaded.(Store)
	if !ok {
		return nil, fmt.Errorf("store: %T is no store", loaded)
	}
	shared := store.Shared()
	if shared != nil && a.Pepper == "" {
		return nil, errors.New("store: instances that share a store must share the secret that keys are hashed with: " +
			"add pepper {env.EDGE_LIMIT_PEPPER}, or {file.PATH}, with the same value on all of them")
	}
	return shared, nil
}

// unmarshalStore parses the option store.
func (a *App) unmarshalStore(b *block) error {
	if !b.NextArg() {
		return placef(b.Dispenser, "store: an argument is missing: write store memory, or store redis { ... }")
	}
	name := b.Val()
	id := "edge_limit.stores." + name
	if _, err := caddy.GetModule(id); err != nil {
		return placef(b.Dispenser, "store %s: this Caddy has no such store: known are %s; redis comes with the package "+
			"github.com/edgelimit/caddy-edgelimit/redisstore", name, strings.Join(storeNames(), ", "))
	}
	module, err := caddyfile.UnmarshalModule(b.Dispenser, id)
	if err != nil {
		return placedByCaddy(b.Dispenser, err)
	}
	a.StoreRaw = caddyconfig.JSONModuleObject(module, "module", name, nil)
	return nil
}

func storeNames() (names []string) {
	for _, module := range caddy.GetModules("edge_limit.stores") {
		names = append(names, module.ID.Name())
	}
	return names
}

// Interface guards.
var (
	_ Store                 = (*MemoryStore)(nil)
	_ caddyfile.Unmarshaler = (*MemoryStore)(nil)
)
