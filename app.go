package edgelimit

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
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
	// `{file.PATH}` are expanded. Default: random, kept in Caddy's storage.
	Pepper string `json:"pepper,omitempty"`

	// Whether debts and bans survive a restart, in Caddy's storage. Default: true
	// where that storage is a file system.
	Persist *bool `json:"persist,omitempty"`

	// Where budgets are kept: with a store that instances share, the same names
	// and numbers hold for all of them together. Default: `memory`, each instance
	// has its own.
	StoreRaw json.RawMessage `json:"store,omitempty" caddy:"namespace=edge_limit.stores inline_key=module"`

	// Limits that sites can use by name. Default: none.
	Limits []*Limit `json:"limits,omitempty"`

	// Ceilings that sites can use by name. Default: none.
	Ceilings []*Ceiling `json:"ceilings,omitempty"`

	// Bounds of requests in flight that sites can use by name. Default: none.
	InFlight []*InFlight `json:"in_flight,omitempty"`

	ctx          caddy.Context
	logger       *zap.Logger
	pepper       []byte
	pepperStored bool
	persister    *persister // nil: debts end with the process
	fleet        *fleet     // nil: budgets are this instance's own

	budgets     map[string]budget         // defined here, by name
	all         map[string]budget         // defined here or in a site, by name
	definitions map[string]string         // by name: what it was defined as, here or in a site
	templates   map[string][]*keyTemplate // all that make keys, by name: two sites may define one alike
	taken       []stateKey                // what Cleanup must release, in this order
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

	// What responses tell clients of the limit that is closest to denying: `ietf`
	// (`RateLimit-Policy` and `RateLimit`, of draft-ietf-httpapi-ratelimit-headers),
	// `x` (`X-RateLimit-Limit`, `-Remaining` and `-Reset`, in seconds) or `off`.
	// Default: `off`.
	RatelimitHeaders string `json:"ratelimit_headers,omitempty"`

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

// appName is the app's place in the configuration.
const appName = "edge_limit"

const (
	defaultMaxKeys = 1_000_000
	maxMaxKeys     = 1 << 28
)

// CaddyModule returns the Caddy module information.
func (App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  appName,
		New: func() caddy.Module { return new(App) },
	}
}

// Provision sets up what sites share.
func (a *App) Provision(ctx caddy.Context) error {
	a.ctx = ctx
	a.logger = ctx.Logger()
	a.budgets = make(map[string]budget)
	a.all = make(map[string]budget)
	a.definitions = make(map[string]string)
	a.templates = make(map[string][]*keyTemplate)
	if err := registerMetrics(ctx); err != nil {
		return fmt.Errorf("registering metrics: %w", err)
	}
	if err := a.validate(); err != nil {
		return err
	}
	if err := a.provisionState(ctx); err != nil {
		return err
	}
	if err := a.Options.provision(ctx); err != nil {
		return err
	}
	budgets, err := a.define(ctx, a.Limits, a.InFlight, a.Ceilings)
	for _, b := range budgets {
		a.budgets[b.name()] = b
	}
	return err
}

// provisionState gets ready what budgets need to be remembered.
func (a *App) provisionState(ctx caddy.Context) (err error) {
	a.MaxKeys = cmp.Or(a.MaxKeys, defaultMaxKeys)
	if a.pepper, a.pepperStored, err = loadPepper(ctx, a.Pepper); err != nil {
		return fmt.Errorf("pepper: %w", err)
	}
	if a.Persist == nil && persistByDefault(ctx.Storage()) || a.Persist != nil && *a.Persist {
		var key stateKey
		if a.persister, key, err = usePersister(ctx, a.pepper); err != nil {
			return fmt.Errorf("persist: %w", err)
		}
		a.taken = append(a.taken, key)
	}
	shared, err := a.loadStore(ctx)
	if err != nil || shared == nil {
		return err
	}
	var key stateKey
	if a.fleet, key, err = useFleet(shared, a.pepper); err != nil {
		return fmt.Errorf("store: %w", err)
	}
	a.taken = append(a.taken, key)
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

// Start implements caddy.App. From here on something may be written: a
// configuration that is only validated never gets here.
func (a *App) Start() error {
	if !a.pepperStored {
		a.storePepper()
	}
	if a.persister != nil {
		a.persister.start(a.ctx.Storage(), a.pepper, a.logger)
	}
	if a.fleet != nil {
		a.fleet.start(a.logger)
	}
	return nil
}

// Stop implements caddy.App.
func (*App) Stop() error { return nil }

// Cleanup releases what Provision took. The persister was taken first and goes
// first: what it writes is still there.
func (a *App) Cleanup() error {
	for _, key := range a.taken {
		releaseState(key)
	}
	a.taken = nil
	return nil
}

// define gives budgets their place in the whole configuration: their names, and
// the state that they may share. They are returned in the order in which they
// are judged.
func (a *App) define(ctx caddy.Context, limits []*Limit, inFlight []*InFlight, ceilings []*Ceiling) (budgets []budget, err error) {
	if err := refuseNull(limits, inFlight, ceilings); err != nil {
		return nil, err
	}
	for _, limit := range limits {
		if err = a.defineLimit(ctx, limit); err != nil {
			return budgets, err
		}
		budgets = append(budgets, limit)
	}
	for _, f := range inFlight {
		if err = a.defineInFlight(ctx, f); err != nil {
			return budgets, err
		}
		budgets = append(budgets, f)
	}
	for _, ceiling := range ceilings {
		if err = a.defineCeiling(ctx, ceiling); err != nil {
			return budgets, err
		}
		budgets = append(budgets, ceiling)
	}
	for _, b := range budgets {
		a.all[b.name()] = b
	}
	return budgets, nil
}

// refuseNull refuses entries that JSON leaves empty: they define nothing.
func refuseNull(limits []*Limit, inFlight []*InFlight, ceilings []*Ceiling) error {
	const isNull = "%s: an entry is null: define something there, or take it out"
	switch {
	case slices.Contains(limits, nil):
		return fmt.Errorf(isNull, "limits")
	case slices.Contains(inFlight, nil):
		return fmt.Errorf(isNull, "in_flight")
	case slices.Contains(ceilings, nil):
		return fmt.Errorf(isNull, "ceilings")
	}
	return nil
}

func (a *App) defineLimit(ctx caddy.Context, limit *Limit) (err error) {
	if err = limit.provision(ctx, a); err != nil {
		return err
	}
	if err = a.claim(limit.Name, limit.defined); err != nil {
		return err
	}
	a.templates[limit.Name] = append(a.templates[limit.Name], &limit.template)
	key := stateKey{kindLimit, limit.Name}
	isNew := false
	if limit.state, err = takeState(key, func() *limitState { isNew = true; return newLimitState(limit.numbers) }); err != nil {
		return err
	}
	a.taken = append(a.taken, key)
	if a.persister != nil && isNew { // what lives knows more than what was written
		a.persister.restore(limit, clock())
	}
	return nil
}

func (a *App) defineInFlight(ctx caddy.Context, f *InFlight) (err error) {
	if err = f.provision(ctx, a); err != nil {
		return err
	}
	if err = a.claim(f.Name, f.defined); err != nil {
		return err
	}
	a.templates[f.Name] = append(a.templates[f.Name], &f.template)
	key := stateKey{kindInFlight, f.Name}
	if f.state, err = takeState(key, func() *inFlightState { return new(inFlightState) }); err != nil {
		return err
	}
	a.taken = append(a.taken, key)
	return nil
}

func (a *App) defineCeiling(ctx caddy.Context, ceiling *Ceiling) (err error) {
	if err = ceiling.provision(ctx, a); err != nil {
		return err
	}
	if err = a.claim(ceiling.Name, ceiling.defined); err != nil {
		return err
	}
	key := stateKey{kindCeiling, ceiling.Name}
	if ceiling.state, err = takeState(key, func() *ceilingState { return newCeilingState(ceiling.rate) }); err != nil {
		return err
	}
	a.taken = append(a.taken, key)
	return nil
}

// claim refuses a second meaning of a name.
func (a *App) claim(name, definition string) error {
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
	switch o.RatelimitHeaders {
	case "", headersOff, headersIETF, headersX:
	default:
		return fmt.Errorf("ratelimit_headers %q: must be off, ietf or x", o.RatelimitHeaders)
	}
	if err := o.validateForwarding(); err != nil {
		return err
	}
	if o.Client != nil {
		return o.Client.validate()
	}
	return nil
}

// validateForwarding checks what upstreams are told.
func (o *Options) validateForwarding() error {
	if err := validateForward(o.Forward); err != nil {
		return err
	}
	return validateHeaderNames("strip", o.Strip)
}

func (o *Options) provision(ctx caddy.Context) error {
	if o.Client == nil {
		return nil
	}
	return o.Client.provision(ctx)
}

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
