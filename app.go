package edgelimit

import (
	"crypto/rand"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

func init() {
	caddy.RegisterModule(App{})
}

// App holds what all sites share: how the client is found by default, and the
// limits and ceilings that any site can use by name.
type App struct {
	Options

	// How many bits of an IPv4 client count as one client. Default: 32.
	IPv4Prefix int `json:"ipv4_prefix,omitempty"`

	// How many bits of an IPv6 client count as one client. Default: 64, what one
	// customer usually has.
	IPv6Prefix int `json:"ipv6_prefix,omitempty"`

	// The hard bound of each limit's memory: no limit remembers more keys. One
	// key takes 16 bytes. Default: 1000000.
	MaxKeys int `json:"max_keys,omitempty"`

	// The secret that keys are hashed with, at least 16 bytes; `{env.NAME}` and
	// `{file.PATH}` are expanded. Default: random for each process.
	Pepper string `json:"pepper,omitempty"`

	// Limits that sites can use by name.
	Limits []*Limit `json:"limits,omitempty"`

	// Ceilings that sites can use by name.
	Ceilings []*Ceiling `json:"ceilings,omitempty"`

	ctx    caddy.Context
	logger *zap.Logger
	pepper []byte

	definitions map[string]string // by name: what it was defined as
	taken       []stateKey        // what Cleanup must release
	limits      map[string]*Limit
	ceilings    map[string]*Ceiling
}

// Options say how clients are found and what upstreams are told. A site's own
// replace the global ones, each as a whole: they are not merged.
type Options struct {
	// How the client is found. Default: from the connection, and from proxies
	// that the server's own `trusted_proxies` name.
	Client *Client `json:"client,omitempty"`

	// What happens to clients that cannot be resolved: `share` (they have one
	// visible budget of each limit together), `deny` (status 403) or `exempt`
	// (only ceilings apply). Default: `share`.
	Unresolved string `json:"unresolved,omitempty"`

	// Headers that get the client beside `X-Forwarded-For`, or the single word
	// `off`: then headers and remote address stay as they came. Default: none.
	Forward []string `json:"forward,omitempty"`

	// Further identity headers that upstreams must not see. Default: none beside
	// those that are always removed.
	Strip []string `json:"strip,omitempty"`

	// Deny nothing: a trial run that counts and logs. Default: false.
	Observe bool `json:"observe,omitempty"`
}

const (
	unresolvedShare  = "share"
	unresolvedDeny   = "deny"
	unresolvedExempt = "exempt"

	// unresolvedName is what the state is called where an address or the name of
	// a limit would stand.
	unresolvedName = "unresolved"
)

const (
	defaultMaxKeys = 1_000_000
	maxMaxKeys     = 1 << 28
	minPepper      = 16
)

// CaddyModule returns the Caddy module information.
func (App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "edge_limit",
		New: func() caddy.Module { return new(App) },
	}
}

// Provision sets up what sites share.
func (a *App) Provision(ctx caddy.Context) error {
	a.ctx = ctx
	a.logger = ctx.Logger()
	a.definitions = make(map[string]string)
	a.limits = make(map[string]*Limit)
	a.ceilings = make(map[string]*Ceiling)
	if err := registerMetrics(ctx); err != nil {
		return fmt.Errorf("registering metrics: %w", err)
	}
	if err := a.validate(); err != nil {
		return err
	}
	var err error
	if a.pepper, err = loadPepper(a.Pepper); err != nil {
		return fmt.Errorf("pepper: %w", err)
	}
	a.MaxKeys = firstSet(a.MaxKeys, defaultMaxKeys)
	if err := a.Options.provision(ctx); err != nil {
		return err
	}
	for _, limit := range a.Limits {
		if err := a.defineLimit(ctx, limit); err != nil {
			return err
		}
		a.limits[limit.Name] = limit
	}
	for _, ceiling := range a.Ceilings {
		if err := a.defineCeiling(ctx, ceiling); err != nil {
			return err
		}
		a.ceilings[ceiling.Name] = ceiling
	}
	return nil
}

func (a *App) validate() error {
	if err := validatePrefixes(a.IPv4Prefix, a.IPv6Prefix); err != nil {
		return err
	}
	if a.MaxKeys < 0 || a.MaxKeys > maxMaxKeys {
		return fmt.Errorf("max_keys %d: must be from 1 to %d", a.MaxKeys, maxMaxKeys)
	}
	return a.Options.validate()
}

// Start implements caddy.App. Nothing runs in the background.
func (*App) Start() error { return nil }

// Stop implements caddy.App.
func (*App) Stop() error { return nil }

// Cleanup releases what Provision took.
func (a *App) Cleanup() error {
	for _, key := range a.taken {
		releaseState(key)
	}
	a.taken = nil
	return nil
}

// defineLimit gives a limit its place in the whole configuration: its name, and
// the state that it may share.
func (a *App) defineLimit(ctx caddy.Context, limit *Limit) (err error) {
	if err = limit.provision(ctx, a); err != nil {
		return err
	}
	if err = a.define(limit.Name, limit.defined); err != nil {
		return err
	}
	var key stateKey
	if limit.state, key, err = takeLimitState(limit.Name, a.MaxKeys); err == nil {
		a.taken = append(a.taken, key)
	}
	return err
}

// defineCeiling does the same for a ceiling.
func (a *App) defineCeiling(ctx caddy.Context, ceiling *Ceiling) (err error) {
	if err = ceiling.provision(ctx); err != nil {
		return err
	}
	if err = a.define(ceiling.Name, ceiling.defined); err != nil {
		return err
	}
	var key stateKey
	if ceiling.state, key, err = takeCeilingState(ceiling.Name, ceiling.rate); err == nil {
		a.taken = append(a.taken, key)
	}
	return err
}

// define refuses a second meaning of a name.
func (a *App) define(name, definition string) error {
	if before, ok := a.definitions[name]; ok && before != definition {
		return fmt.Errorf("%w (%s / %s)", conflictError(name), before, definition)
	}
	a.definitions[name] = definition
	return nil
}

func conflictError(name string) error {
	return fmt.Errorf("the name %s is defined twice, and not alike: a name means one budget in the whole configuration; "+
		"define it once in the global edge_limit block and use it by name, or give one of them another name", name)
}

func (o *Options) validate() error {
	switch o.Unresolved {
	case "", unresolvedShare, unresolvedDeny, unresolvedExempt:
	default:
		return fmt.Errorf("unresolved %q: must be share, deny or exempt", o.Unresolved)
	}
	if err := validateForward(o.Forward); err != nil {
		return err
	}
	if err := validateHeaderNames("strip", o.Strip); err != nil {
		return err
	}
	if o.Client != nil {
		return o.Client.validate()
	}
	return nil
}

func (o *Options) provision(ctx caddy.Context) error {
	if o.Client == nil {
		return nil
	}
	return o.Client.provision(ctx)
}

// loadPepper reads the secret of all keys.
func loadPepper(configured string) ([]byte, error) {
	if configured == "" {
		return processPepper(), nil
	}
	value, err := resolveSecret(configured)
	if err != nil {
		return nil, err
	}
	if len(value) < minPepper {
		return nil, fmt.Errorf("a secret of %d bytes can be guessed: give at least %d", len(value), minPepper)
	}
	return []byte(value), nil
}

// processPepper is the same over all reloads, so that keys stay what they were.
var processPepper = sync.OnceValue(func() []byte {
	pepper := make([]byte, 32)
	_, _ = rand.Read(pepper) // never fails, says crypto/rand
	return pepper
})

// clock counts nanoseconds of monotonic time, always above 0: no jump of the
// wall clock changes a budget.
func clock() int64 { return int64(time.Since(processStart)) }

var processStart = time.Now().Add(-time.Hour)

// Interface guards.
var (
	_ caddy.App          = (*App)(nil)
	_ caddy.Provisioner  = (*App)(nil)
	_ caddy.CleanerUpper = (*App)(nil)
)
