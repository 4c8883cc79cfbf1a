// Package edgelimit is a rate limiter for Caddy that knows whom it limits: it
// resolves the client from the connection and from trusted writers only, limits
// by it, and tells the upstream one address.
package edgelimit

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"slices"

	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(Handler{})
}

// Handler resolves the client of each request, limits it, and tells the upstream
// one client address in `X-Forwarded-For`, or none.
//
// Requests go one way: resolve (and remove what callers can forge), key, decide,
// deny or forward. Resolving and removing apply to every request that reaches
// the handler; what its matcher does not select is only not limited. Without any
// limit the handler is complete: it resolves and forwards.
//
// These placeholders are set:
//
// Placeholder | Description
// ------------|---------------
// `{http.edge_limit.client_ip}` | The client's address, or `unresolved`
// `{http.edge_limit.client}` | The client as keys see it: an address or a prefix, or `unresolved`
// `{http.edge_limit.source}` | Why it is believed: `connection`, `server`, `trusted_proxies`, `hops`, `single_value`, `proof`, `unresolved`
// `{http.edge_limit.reason}` | Why it is unresolved (`missing_header`, `malformed`, `not_single`, `no_address`) or deserves a look (`short_chain`, `unverified_hop`, `untrusted_header`)
// `{http.edge_limit.exceeded.name}` | The limit or ceiling that denied the request
// `{http.edge_limit.exceeded.retry_after}` | The seconds to wait, where waiting helps
//
// Caddy's own `{client_ip}` and `client_ip` matcher agree with it. An unresolved
// client is no address: a `client_ip` matcher then matches nothing and Caddy logs
// an error. Behind the handler a `remote_ip` matcher sees the client too.
type Handler struct {
	Options

	// Which requests are limited. It is judged after the client is known. Default:
	// all.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// Names of limits, ceilings and in_flights that the edge_limit app defines.
	// Default: none.
	Use []string `json:"use,omitempty"`

	// Budgets for each key. Default: none.
	Limits []*Limit `json:"limits,omitempty"`

	// Budgets that nothing in a request can influence. Default: none.
	Ceilings []*Ceiling `json:"ceilings,omitempty"`

	// Bounds of requests at the same time. Default: none.
	InFlight []*InFlight `json:"in_flight,omitempty"`

	matchers   caddyhttp.MatcherSets
	keyed      []*Limit
	inFlight   []*InFlight
	ceilings   []*Ceiling
	fleet      *fleet // nil: budgets are this instance's own
	client     *Client
	unresolved string
	observe    bool
	headers    string // how responses tell of limits
	forwarder  forwarder
	ipv4Bits   int
	ipv6Bits   int
	site       string            // tells this handler's warnings from another's
	server     *caddyhttp.Server // nil if the handler is no server's
	logger     *zap.Logger
	now        func() int64 // monotonic nanoseconds
}

// CaddyModule returns the Caddy module information.
func (Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.edge_limit",
		New: func() caddy.Module { return new(Handler) },
	}
}

// Provision sets up the handler.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.logger = ctx.Logger()
	h.now = clock
	h.server, _ = ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	h.site = siteOf(h)
	loaded, err := ctx.App(appName)
	if err != nil {
		return fmt.Errorf("loading the edge_limit app: %w", err)
	}
	app := loaded.(*App)
	h.fleet = app.fleet

	if err := h.Options.validate(); err != nil {
		return err
	}
	if err := h.Options.provision(ctx); err != nil {
		return err
	}
	if err := h.provisionBudgets(ctx, app); err != nil {
		return err
	}
	if err := checkProvenance(h.keyed, h.inFlight, h.ceilings); err != nil {
		return err
	}
	if h.matchers, err = loadMatchers(ctx, h); err != nil {
		return err
	}
	return h.settleOptions(ctx, app)
}

// provisionBudgets collects the handler's own budgets and those used by name.
func (h *Handler) provisionBudgets(ctx caddy.Context, app *App) error {
	if err := refuseNull(h.Limits, h.InFlight, h.Ceilings); err != nil {
		return err
	}
	var budgets []budget
	seen := make(map[string]bool)
	for _, name := range h.names() {
		if seen[name] {
			return fmt.Errorf("the name %s is defined twice in this handler, or used and defined: name it once, for a request counts against it once", name)
		}
		seen[name] = true
	}
	for _, name := range h.Use {
		b, ok := app.budgets[name]
		if !ok {
			return unknownNameError(name)
		}
		budgets = append(budgets, b)
	}
	own, err := app.define(ctx, h.Limits, h.InFlight, h.Ceilings)
	if err != nil {
		return err
	}
	for _, b := range append(budgets, own...) {
		switch b := b.(type) {
		case *Limit:
			h.keyed = append(h.keyed, b)
		case *InFlight:
			h.inFlight = append(h.inFlight, b)
		case *Ceiling:
			h.ceilings = append(h.ceilings, b)
		}
	}
	return nil
}

// names are those of all budgets of this handler.
func (h *Handler) names() []string {
	names := slices.Clone(h.Use)
	for _, l := range h.Limits {
		names = append(names, l.Name)
	}
	for _, f := range h.InFlight {
		names = append(names, f.Name)
	}
	for _, c := range h.Ceilings {
		names = append(names, c.Name)
	}
	return names
}

// siteOf names a handler by what it is configured to do, which a reload of the
// same configuration does not change.
func siteOf(h *Handler) string {
	text, _ := json.Marshal(h)
	digest := sha256.Sum256(text)
	return string(digest[:])
}

func unknownNameError(name string) error {
	return fmt.Errorf("%s is not defined: define a limit, ceiling or in_flight of that name in the global edge_limit block "+
		"(what the directive's own block defines applies already, and is not named; a matcher comes first)", name)
}

// settleOptions works out which options hold for this handler.
func (h *Handler) settleOptions(ctx caddy.Context, app *App) error {
	h.client = h.Client
	if h.client == nil {
		h.client = app.Client
	}
	if h.client == nil {
		h.client = new(Client)
		if err := h.client.provision(ctx); err != nil {
			return err
		}
	}
	h.unresolved = cmp.Or(h.Unresolved, app.Unresolved, unresolvedShare)
	h.observe = h.Observe || app.Observe
	h.headers = cmp.Or(h.RatelimitHeaders, app.RatelimitHeaders, headersOff)
	forward, strip := h.Forward, h.Strip
	if forward == nil {
		forward = app.Forward
	}
	if strip == nil {
		strip = app.Strip
	}
	h.forwarder = newForwarder(h.client, forward, strip)
	h.ipv4Bits = cmp.Or(app.IPv4Prefix, defaultIPv4Prefix)
	h.ipv6Bits = cmp.Or(app.IPv6Prefix, defaultIPv6Prefix)
	h.warnLax()
	if h.forwarder.off && (h.Strip != nil || h.Forward == nil && app.Strip != nil) {
		h.warnUselessStrip(strip)
	}
	return nil
}

// How many budgets a request can count against before the list of its charges
// takes memory.
const (
	fewCharges  = 4
	manyCharges = 16
)

// ServeHTTP resolves, decides, and denies or forwards.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	local := localAddr(r)
	if isVirtual(local) || isEarly(r) {
		return h.serveUnknown(w, r, next)
	}

	state, first := h.resolve(r, local)
	remoteAddr := r.RemoteAddr
	defer func() { r.RemoteAddr = remoteAddr }()
	r.RemoteAddr = state.peerAddr // what matchers see, in a second run too
	h.forwarder.remove(r, state.peerTrusted, func(name string) {
		if first {
			h.noteRemoved(state, name)
		}
	})

	// room on the stack, of which more takes longer to clear
	var few [fewCharges]charge
	room := few[:0]
	if len(h.keyed)+len(h.inFlight)+len(h.ceilings) > fewCharges {
		room = make([]charge, 0, manyCharges)
	}
	charges, denial, err := h.decide(r, state, room, h.now())
	if err != nil {
		return err
	}
	if denial.status != 0 {
		return h.deny(w, r, state, denial)
	}

	h.forwarder.tell(r, state)
	return h.serve(w, r, next, charges)
}

// serve calls next, and sees to what ends with the response.
func (h *Handler) serve(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler, charges []charge) error {
	var quota *quota
	if h.headers != headersOff {
		quota = h.quota(charges, h.now())
	}
	if quota == nil && !needsSettling(charges) {
		return next.ServeHTTP(w, r)
	}
	return h.serveSettled(w, r, next, slices.Clone(charges), quota)
}

// resolve finds the client once a request: whoever comes later gets the same
// answer, whatever its own configuration says.
func (h *Handler) resolve(r *http.Request, local net.Addr) (state *requestState, first bool) {
	vars := varsOf(r)
	if state := stateOf(vars); state != nil {
		return state, false
	}
	state = &requestState{config: h.client, vars: vars, ipv4Bits: uint8(h.ipv4Bits), ipv6Bits: uint8(h.ipv6Bits)}
	res := &state.resolution
	h.client.resolveInto(res, r, vars, local)
	resolvedTotal[res.source][res.reason].Add(1)
	if res.reason != reasonNone {
		h.warnResolution(r, res)
	}
	state.remember(r, h.server)
	return state, true
}

// serveUnknown passes on requests whose sender cannot be known, without charging
// anybody: Caddy's own, which come over no connection, and early data that an
// error route sees. Other early data is refused, so that it is sent again.
func (h *Handler) serveUnknown(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if isEarly(r) && !isErrorRoute(r) {
		return caddyhttp.Error(http.StatusTooEarly, errTooEarly)
	}
	h.forwarder.remove(r, false, func(string) {})
	if !h.forwarder.off {
		tellNone(r)
	}
	return next.ServeHTTP(w, r)
}

// Interface guards.
var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
