package edgelimit

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/edgelimit/caddy-edgelimit/internal/chain"
)

func init() {
	caddy.RegisterModule(Admin{})
}

// Admin answers under /edge_limit/ of Caddy's admin API, for the configuration
// that runs:
//
//	GET    /edge_limit/limits                      what each name counts and has counted
//	POST   /edge_limit/limits/{name}/keys          how one key stands; the body holds its parts
//	DELETE /edge_limit/limits/{name}/keys          the same, and forgets its debt and its ban
//	GET    /edge_limit/store                       how the store that instances share stands
//	GET    /edge_limit/resolve?peer=&header=&site= who the client would be, explained
//
// The parts of a key are a JSON object from each part that is not mere text, as
// it is written in the configuration, to its value: {"client": "203.0.113.7"}.
type Admin struct{}

// CaddyModule returns the Caddy module information.
func (Admin) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "admin.api.edge_limit",
		New: func() caddy.Module { return new(Admin) },
	}
}

// Routes implements caddy.AdminRouter.
func (Admin) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{{Pattern: "/edge_limit/", Handler: caddy.AdminHandlerFunc(serveAdmin)}}
}

const maxAdminBody = 1 << 20

func serveAdmin(w http.ResponseWriter, r *http.Request) error {
	app, err := activeApp()
	if err != nil {
		return err
	}
	path := strings.Split(strings.Trim(strings.TrimPrefix(r.URL.Path, "/edge_limit/"), "/"), "/")
	switch {
	case len(path) == 1 && path[0] == "limits":
		if err := allowMethods(r, http.MethodGet); err != nil {
			return err
		}
		return writeJSON(w, app.reports())
	case len(path) == 1 && path[0] == "store":
		if err := allowMethods(r, http.MethodGet); err != nil {
			return err
		}
		return app.serveStore(w)
	case len(path) == 1 && path[0] == "resolve":
		if err := allowMethods(r, http.MethodGet); err != nil {
			return err
		}
		return app.serveResolve(w, r)
	case len(path) == 3 && path[0] == "limits" && path[2] == "keys":
		if err := allowMethods(r, http.MethodPost, http.MethodDelete); err != nil {
			return err
		}
		return app.serveKey(w, r, path[1])
	}
	return adminError(http.StatusNotFound, "there is no %s: known are limits, limits/{name}/keys, store and resolve", r.URL.Path)
}

// activeApp is the app of the configuration that runs.
func activeApp() (*App, error) {
	app, err := caddy.ActiveContext().AppIfConfigured(appName)
	if errors.Is(err, caddy.ErrNotConfigured) {
		return nil, adminError(http.StatusNotFound, "the configuration that runs has no edge_limit")
	}
	if err != nil {
		return nil, err
	}
	return app.(*App), nil
}

func adminError(status int, format string, args ...any) error {
	return caddy.APIError{HTTPStatus: status, Err: fmt.Errorf(format, args...)}
}

func allowMethods(r *http.Request, methods ...string) error {
	if slices.Contains(methods, r.Method) {
		return nil
	}
	return adminError(http.StatusMethodNotAllowed, "%s %s: only %s is possible", r.Method, r.URL.Path, strings.Join(methods, " and "))
}

func writeJSON(w http.ResponseWriter, answer any) error {
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(answer)
}

// budgetReport is what is known under one name.
type budgetReport struct {
	Name      string     `json:"name"`
	Kind      string     `json:"kind"`
	Rate      string     `json:"rate,omitempty"`
	Burst     int64      `json:"burst,omitempty"`
	Max       int64      `json:"max,omitempty"`
	Key       []string   `json:"key,omitempty"`
	Keys      *int       `json:"keys,omitempty"`
	Used      *float64   `json:"used_ratio,omitempty"`
	InFlight  *int64     `json:"in_flight,omitempty"`
	Allowed   uint64     `json:"allowed"`
	Denied    uint64     `json:"denied"`
	WouldDeny uint64     `json:"would_deny"`
	Exempt    uint64     `json:"exempt"`
	Forgotten *forgotten `json:"forgotten,omitempty"`
	TopKeys   []keyShare `json:"top_keys,omitempty"`
}

type forgotten struct {
	DebtFree uint64 `json:"debt_free"`
	Indebted uint64 `json:"indebted"`
}

type keyShare struct {
	Key   string  `json:"key"` // its keyed hash
	Share float64 `json:"share"`
}

// reports lists all names of the configuration, in order.
func (a *App) reports() []budgetReport {
	reports := []budgetReport{}
	for _, b := range a.all {
		report := budgetReport{Name: b.name()}
		counted := b.counters()
		report.Allowed, report.Denied = counted.count(outcomeAllowed), counted.count(outcomeDenied)
		report.WouldDeny, report.Exempt = counted.count(outcomeWouldDeny), counted.count(outcomeExempt)
		b.report(&report)
		reports = append(reports, report)
	}
	slices.SortFunc(reports, func(a, b budgetReport) int { return strings.Compare(a.Name, b.Name) })
	return reports
}

func (l *Limit) report(report *budgetReport) {
	debts := l.state.ledger.Load()
	keys := debts.Len()
	debtFree, indebted := debts.Forgotten()
	report.Kind, report.Rate, report.Burst, report.Key = kindLimit, l.Rate, l.burst(), rawParts(l.key)
	report.Keys, report.Forgotten = &keys, &forgotten{debtFree, indebted}
	top, _ := l.state.traffic.sketch.All()
	for _, key := range top[:min(10, len(top))] {
		report.TopKeys = append(report.TopKeys, keyShare{hashText(key.Hash), key.Share})
	}
}

func (f *InFlight) report(report *budgetReport) {
	running := f.state.running.inFlight()
	report.Kind, report.Max, report.Key, report.InFlight = kindInFlight, f.Max, rawParts(f.key), &running
}

func (c *Ceiling) report(report *budgetReport) {
	used := c.state.usedRatio(clock())
	report.Kind, report.Rate, report.Used = kindCeiling, c.Rate, &used
}

// keyReport is how one key stands.
type keyReport struct {
	Key        string  `json:"key"` // its keyed hash
	Remaining  int64   `json:"remaining"`
	RetryAfter int64   `json:"retry_after"` // seconds until a request passes; 0: now
	BannedFor  float64 `json:"banned_for"`  // seconds
	Forgiven   bool    `json:"forgiven,omitempty"`
}

func (a *App) serveKey(w http.ResponseWriter, r *http.Request, name string) error {
	var limit *Limit
	for _, b := range a.all {
		if b.name() == name {
			if limit, _ = b.(*Limit); limit == nil {
				return adminError(http.StatusBadRequest, "%s is no limit, so it has no keys to look up", name)
			}
		}
	}
	if limit == nil {
		return adminError(http.StatusNotFound, "no limit is named %q: GET /edge_limit/limits lists them", name)
	}
	var parts map[string]string
	body := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxAdminBody))
	if err := body.Decode(&parts); err != nil {
		return adminError(http.StatusBadRequest, `the body must be a JSON object of the key's parts, such as {"client": "203.0.113.7"}: %w`, err)
	}
	key, material, err := limit.template.lookUp(parts)
	if err != nil {
		return adminError(http.StatusBadRequest, "limit %s: %w", name, err)
	}
	limit.adopt(clock()) // no request may have come since a reload
	forgive := r.Method == http.MethodDelete
	forgiven, err := limit.consultStore(key, material, forgive)
	if err != nil {
		return adminError(http.StatusServiceUnavailable, "the store cannot be asked: %w", err)
	}
	if forgive {
		debts := limit.state.of(key, clock())
		_, debt := debts.Delete(key)
		_, ban := debts.Delete(banKey(key))
		forgiven = forgiven || debt || ban
	}
	report := limit.reportKey(key, clock())
	report.Forgiven = forgiven
	return writeJSON(w, report)
}

// consultStore learns from a shared store how a key stands, or forgives it there.
func (l *Limit) consultStore(key uint64, material []byte, forgive bool) (forgiven bool, err error) {
	fleet := l.app.fleet
	if fleet == nil {
		return false, nil
	}
	asked := []StoreCharge{{
		Key: fleet.key(StoreLimit, l.Name, material), Tolerance: time.Duration(l.gcra.tolerance),
		Increment: time.Duration(l.gcra.emissionInterval), Peek: true, Observe: true, Ban: time.Duration(l.Ban), Look: true,
	}}
	err = fleet.call(beatTimeout, func(ctx context.Context, conn StoreConn) (err error) {
		if forgive {
			forgiven, err = conn.Forget(ctx, asked[0].Key)
			return err
		}
		return conn.Take(ctx, asked)
	})
	switch denied := l.state.denied.Load(); {
	case err != nil:
	case !forgive:
		l.learn(key, &asked[0], clock(), true)
	case denied != nil:
		denied.Delete(key) // other instances ask again within a second
	}
	return forgiven, err
}

func (a *App) serveStore(w http.ResponseWriter) error {
	if a.fleet == nil {
		return adminError(http.StatusNotFound, "this instance keeps its budgets itself: no store is configured")
	}
	return writeJSON(w, a.fleet.report())
}

func (l *Limit) reportKey(key uint64, now int64) keyReport {
	debts := l.state.of(key, now)
	report := keyReport{
		Key:       hashText(key),
		Remaining: debts.remaining(debts.Peek(key, now), now),
		BannedFor: l.banned(key, now).Round(time.Millisecond).Seconds(),
	}
	if wait, ok := l.peekOwn(key, l.gcra.emissionInterval, now); !ok {
		report.RetryAfter = retryAfter(wait)
	}
	return report
}

// lookUp computes the key that a request with these parts would have.
func (t *keyTemplate) lookUp(parts map[string]string) (key uint64, material []byte, err error) {
	res := resolution{source: sourceUnresolved}
	repl := caddy.NewEmptyReplacer()
	used := 0
	for _, part := range t.parts {
		if part.literal() {
			continue
		}
		value, ok := parts[part.raw]
		if !ok {
			return 0, nil, fmt.Errorf("the part %q is missing; the key is %s", part.raw, strings.Join(rawParts(t.parts), " "))
		}
		used++
		if !part.client {
			if len(part.pieces) > 1 {
				return 0, nil, fmt.Errorf("the part %q mixes text and placeholders and cannot be looked up", part.raw)
			}
			repl.Set(part.pieces[0].text, value)
			continue
		}
		if value == unresolvedName {
			continue
		}
		client, ok := chain.ParseAddr(value)
		if !ok {
			return 0, nil, fmt.Errorf("the client %q is no address; write one, or %q", value, unresolvedName)
		}
		res.resolve(client, sourceConnection, reasonNone)
	}
	if used != len(parts) {
		return 0, nil, fmt.Errorf("there are parts that the key does not have; it is %s", strings.Join(rawParts(t.parts), " "))
	}
	material, _ = t.appendMaterial(nil, &res, repl)
	key, _ = t.hash(&res, repl)
	return key, material, nil
}

// serveResolve explains who the client of a request would be.
func (a *App) serveResolve(w http.ResponseWriter, r *http.Request) error {
	query := r.URL.Query()
	peer := query.Get("peer")
	if _, err := netip.ParseAddrPort(peer); err != nil {
		addr, err := netip.ParseAddr(peer)
		if err != nil {
			return adminError(http.StatusBadRequest, "peer=%q is no address: write peer=192.0.2.1", peer)
		}
		peer = netip.AddrPortFrom(addr, 0).String()
	}
	client, server, err := a.clientOf(query.Get("site"))
	if err != nil {
		return err
	}
	request := &http.Request{
		Method: http.MethodGet, URL: r.URL, Host: query.Get("site"), RemoteAddr: peer, Header: make(http.Header), Proto: "HTTP/1.1",
	}
	// the admin API itself may listen on a Unix socket
	request = request.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, new(net.TCPAddr)))
	client.setLines(request.Header, query["header"])
	request = caddyhttp.PrepareRequest(request, caddy.NewReplacer(), nil, server)
	res := client.resolve(request, varsOf(request))
	state := &requestState{resolution: res, config: client, peerAddr: peer}
	if res.resolved() {
		state.remoteAddr = netip.AddrPortFrom(res.client, 0).String()
	}
	return writeJSON(w, (&Probe{Detail: true}).answer(state))
}

// clientOf is the client block of a site, with its server, or the global one.
func (a *App) clientOf(site string) (*Client, *caddyhttp.Server, error) {
	if site == "" {
		client := a.Client
		if client == nil {
			client = new(Client)
			if err := client.provision(a.ctx); err != nil {
				return nil, nil, err
			}
		}
		return client, nil, nil
	}
	loaded, err := caddy.ActiveContext().AppIfConfigured("http")
	if err != nil {
		return nil, nil, adminError(http.StatusNotFound, "no site runs")
	}
	host, port, err := net.SplitHostPort(site)
	if err != nil {
		host, port = site, ""
	}
	servers := loaded.(*caddyhttp.App).Servers
	var candidates []*caddyhttp.Server
	for _, name := range slices.Sorted(maps.Keys(servers)) {
		if server := servers[name]; port == "" || listensOn(server, port) {
			candidates = append(candidates, server)
		}
	}
	// a server that names the host comes before one that takes any
	slices.SortStableFunc(candidates, func(a, b *caddyhttp.Server) int {
		return cmp.Compare(namesHost(b.Routes, host), namesHost(a.Routes, host))
	})
	for _, server := range candidates {
		handler := handlerFor(server.Routes, host)
		if handler != nil {
			return handler.client, server, nil
		}
		if namesHost(server.Routes, host) > 0 {
			break // another site's edge_limit is not this one's
		}
	}
	return nil, nil, adminError(http.StatusNotFound, "no site with an edge_limit answers for %q; name a port too if sites share a host", site)
}

// namesHost counts the routes that take requests for a host by name.
func namesHost(routes caddyhttp.RouteList, host string) (count int) {
	request := &http.Request{Host: host, URL: new(url.URL), Header: make(http.Header)}
	for _, route := range routes {
		if len(route.MatcherSets) > 0 && takesHost(route, request) {
			count++
		}
	}
	return count
}

// listensOn says whether one of the server's listeners has that port.
func listensOn(server *caddyhttp.Server, port string) bool {
	number, err := strconv.ParseUint(port, 10, 16)
	return err == nil && slices.ContainsFunc(server.Listen, func(text string) bool {
		addr, err := caddy.ParseNetworkAddress(text)
		return err == nil && addr.StartPort <= uint(number) && uint(number) <= addr.EndPort
	})
}

// handlerFor finds the edge_limit that requests for a host meet first, or nil if
// they meet none.
func handlerFor(routes caddyhttp.RouteList, host string) *Handler {
	request := &http.Request{Host: host, URL: new(url.URL), Header: make(http.Header)}
	for _, route := range routes {
		if !takesHost(route, request) {
			continue
		}
		for _, handler := range route.Handlers {
			switch handler := handler.(type) {
			case *Handler:
				return handler
			case *caddyhttp.Subroute:
				if found := handlerFor(handler.Routes, host); found != nil {
					return found
				}
			}
		}
		if route.Terminal {
			return nil // another site's edge_limit is not this one's
		}
	}
	return nil
}

// takesHost judges a route by its host matchers alone.
func takesHost(route caddyhttp.Route, request *http.Request) bool {
	if len(route.MatcherSets) == 0 {
		return true
	}
	request = caddyhttp.PrepareRequest(request, caddy.NewReplacer(), nil, nil)
	for _, set := range route.MatcherSets {
		if takes := !slices.ContainsFunc(set, func(matcher any) bool {
			hosts, ok := matcher.(*caddyhttp.MatchHost)
			return ok && !hosts.Match(request)
		}); takes {
			return true
		}
	}
	return false
}

// Interface guards.
var _ caddy.AdminRouter = (*Admin)(nil)
