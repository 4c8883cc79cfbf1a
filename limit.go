package edgelimit

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"regexp"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Limit is a budget for each key, by default for each client: at most burst
// requests at once and its rate over time. In a first window up to twice the
// count can pass: the burst, and what is refilled meanwhile.
type Limit struct {
	// The name, unique in the whole configuration: `[a-z0-9_]+`. The same full
	// definition in two sites is one budget.
	Name string `json:"name,omitempty"`

	// How fast the budget refills: `<count>/<window>`, for example `10/m`,
	// `100/s`, `20/10s`.
	Rate string `json:"rate,omitempty"`

	// How many requests pass at once. Default: the rate's count.
	Burst int64 `json:"burst,omitempty"`

	// What tells one budget from another: the word `client`, placeholders and
	// text, each as one part. Default: `client`.
	Key []string `json:"key,omitempty"`

	// Who writes those parts of the key that are not known to be written by the
	// connection, a trusted proxy or the server: `server` ("my own server sets
	// it") or `caller` ("I know that it can be renewed at will"). Default: the
	// caller does, and the handler must then bound the limit by something that
	// the caller cannot influence.
	KeyWriter string `json:"key_writer,omitempty"`

	// How many bits of an IPv4 client count. Default: the global option's.
	IPv4Prefix int `json:"ipv4_prefix,omitempty"`

	// How many bits of an IPv6 client count. Default: the global option's.
	IPv6Prefix int `json:"ipv6_prefix,omitempty"`

	// Which requests the limit applies to. Default: all that the handler's
	// matcher selects.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// Clients that the limit does not apply to, from any module of the
	// `http.ip_sources` namespace. Default: none.
	ExemptRaw []json.RawMessage `json:"exempt,omitempty" caddy:"namespace=http.ip_sources inline_key=source"`

	// Charge only for these responses, so that who does it right is never
	// limited: a login that counts 401. The request is charged when it comes in
	// and given back when the final status is another, so that not one failing
	// attempt more than the budget gets through, however many come at once.
	// Default: every request is charged.
	OnStatus *OnStatus `json:"on_status,omitempty"`

	// Once denied by this limit, denied by it for so long. Default: no ban.
	Ban caddy.Duration `json:"ban,omitempty"`

	// Count the ban from the last attempt, not from the first denial. Default:
	// false.
	Extend bool `json:"extend,omitempty"`

	// How many requests' worth this one takes from the budget: a positive number,
	// or a placeholder. A value that is no positive number counts as 1; one above
	// the burst can never pass. Default: 1.
	Cost string `json:"cost,omitempty"`

	// The status of a denial. Default: 429.
	Status int `json:"status,omitempty"`

	// Count and log, but never deny. Default: false.
	Observe bool `json:"observe,omitempty"`

	rate     rate
	gcra     gcra
	key      []keyPart
	match    string // MatcherSetsRaw as text: loading modules clears it
	exempted bool   // ExemptRaw is not empty
	defined  string // what makes two limits of one name the same budget
	refusal  refusal
	template keyTemplate
	cost     cost
	numbers  limitNumbers
	matchers caddyhttp.MatcherSets
	exempt   []caddyhttp.IPRangeSource
	app      *App
	state    *limitState
}

// OnStatus says which responses a limit charges for.
type OnStatus struct {
	// Charge with the response instead of before it, for pages that load many
	// things at once: the budget may be overshot by what is in flight. Default:
	// false.
	Late bool `json:"late,omitempty"`

	// Status codes, or classes such as `5xx`.
	Codes []string `json:"codes,omitempty"`

	charged [600]bool
}

// validate checks and parses what can be judged without the rest of the
// configuration.
func (l *Limit) validate() error {
	if err := validateName(l.Name); err != nil {
		return err
	}
	var err error
	if l.rate, err = parseRate(l.Rate); err != nil {
		return err
	}
	if l.gcra, err = newGCRA(l.rate, l.burst()); err != nil {
		return err
	}
	if l.key, err = parseKey(l.Key); err != nil {
		return err
	}
	if err := validateKeyWriter(l.KeyWriter); err != nil {
		return err
	}
	if err := validatePrefixes(l.IPv4Prefix, l.IPv6Prefix); err != nil {
		return err
	}
	if err := l.OnStatus.validate(); err != nil {
		return err
	}
	if l.Ban < 0 || time.Duration(l.Ban) > maxWindow {
		return errors.New("ban must be a duration of at most 3650d")
	}
	if l.Extend && l.Ban == 0 {
		return errors.New("extend says how a ban is counted: write ban <duration> extend")
	}
	if l.cost, err = parseCost(l.Cost, l.burst()); err != nil {
		return err
	}
	if err := validateStatus(l.Status); err != nil {
		return err
	}
	l.match, l.exempted = rawMatch(l.MatcherSetsRaw), len(l.ExemptRaw) > 0
	l.defined = l.definition()
	l.refusal = refusal{&exceededError{"limit", l.Name}, quotaExceeded(l.Name, l.status())}
	return nil
}

func validateKeyWriter(writer string) error {
	if writer != "" && writer != "caller" && writer != "server" {
		return fmt.Errorf("key_writer %q: must be caller or server", writer)
	}
	return nil
}

func (l *Limit) provision(ctx caddy.Context, app *App) (err error) {
	if err = l.validate(); err != nil {
		return fmt.Errorf("limit %s: %w", l.Name, err)
	}
	l.app = app
	if err = l.requireShareable(); err != nil {
		return fmt.Errorf("limit %s: %w", l.Name, err)
	}
	l.numbers = limitNumbers{l.gcra, app.MaxKeys}
	l.template.parts = l.key
	l.template.ipv4Bits = cmp.Or(l.IPv4Prefix, app.IPv4Prefix, defaultIPv4Prefix)
	l.template.ipv6Bits = cmp.Or(l.IPv6Prefix, app.IPv6Prefix, defaultIPv6Prefix)
	l.template.secret.Store(newKeySecret(app.pepper, l.Name))
	if l.matchers, err = loadMatchers(ctx, l); err != nil {
		return fmt.Errorf("limit %s: %w", l.Name, err)
	}
	if l.exempted {
		if l.exempt, err = loadIPSources(ctx, l, "ExemptRaw"); err != nil {
			return fmt.Errorf("limit %s: exempt: %w", l.Name, err)
		}
	}
	return nil
}

// definition writes the limit with all defaults filled in.
func (l *Limit) definition() string {
	cost := l.Cost
	if cost == "" {
		cost = "1"
	}
	text, _ := json.Marshal(struct {
		*Limit
		Cost   string   `json:"cost"`
		Rate   string   `json:"rate"`
		Burst  int64    `json:"burst"`
		Status int      `json:"status"`
		Key    []string `json:"key"`
	}{l, cost, l.rate.String(), l.burst(), l.status(), rawParts(l.key)})
	return "limit " + string(text)
}

func (l *Limit) burst() int64 {
	if l.Burst == 0 {
		return l.rate.count
	}
	return l.Burst
}

func (l *Limit) status() int {
	if l.Status == 0 {
		return http.StatusTooManyRequests
	}
	return l.Status
}

// exempts says whether the limit leaves this client alone. An unresolved client
// is nobody's exception.
func (l *Limit) exempts(r *http.Request, res *resolution) bool {
	return res.resolved() && len(l.exempt) > 0 && anyContains(l.exempt, r, res.client)
}

// Limit is a budget.
func (l *Limit) name() string        { return l.Name }
func (l *Limit) counters() *counters { return &l.state.counters }
func (l *Limit) denials() *denialLog { return &l.state.denials }
func (l *Limit) observed() bool      { return l.Observe }

func (l *Limit) peek(key uint64, increment, now int64) (time.Duration, bool) {
	l.adopt(now)
	if l.app.fleet == nil {
		return l.peekOwn(key, increment, now)
	}
	if increment > l.gcra.tolerance {
		return 0, false
	}
	wait, denied := l.knownDenied(key, increment, now)
	return wait, !denied
}

// peekOwn is peek by what this instance knows.
func (l *Limit) peekOwn(key uint64, increment, now int64) (time.Duration, bool) {
	debts := l.state.of(key, now)
	wait, ok := debts.peek(debts.Table, key, debts.converted(increment, l.gcra), now)
	if ban := l.banned(key, now); ban > 0 {
		return max(wait, ban), false
	}
	return wait, ok
}

// take charges the request, or says how long it must wait. mark is what giveBack
// wants: the key's TAT, or with on_status the charge's number.
func (l *Limit) take(key uint64, increment, now int64) (mark int64, wait time.Duration, ok bool) {
	l.adopt(now)
	if l.late() || l.banned(key, now) > 0 {
		if l.app.fleet != nil {
			increment = min(increment, l.gcra.tolerance)
		}
		wait, ok = l.peekOwn(key, increment, now)
		return 0, wait, ok
	}
	debts := l.state.of(key, now)
	numbers := debts.gcra
	increment = numbers.converted(increment, l.gcra)
	if l.app.fleet != nil && increment < math.MaxInt64 { // a share of a burst that is smaller than the request
		numbers.tolerance = max(numbers.tolerance, increment)
	}
	if l.OnStatus != nil {
		return l.state.pending.take(numbers, debts, key, increment, now)
	}
	return numbers.take(debts.Table, key, increment, now)
}

func (l *Limit) giveBack(key uint64, increment, mark, now int64) {
	debts := l.state.of(key, now)
	switch {
	case l.late():
	case l.OnStatus != nil:
		l.state.pending.end(debts, key, mark, true, now)
	default:
		debts.giveBack(debts.Table, key, debts.converted(increment, l.gcra), mark, now)
	}
}

// deny starts or extends the ban, if there is one, and describes the denial.
func (l *Limit) deny(key uint64, wait time.Duration, now int64) denial {
	if l.Ban > 0 {
		until := now + int64(l.Ban)
		if l.Extend || l.banned(key, now) == 0 {
			l.state.of(key, now).Set(banKey(key), now, until)
		}
		wait = max(wait, l.banned(key, now))
	}
	return denial{name: l.Name, status: l.status(), wait: wait, refusal: &l.refusal}
}

// banned is how long the key's ban still lasts.
func (l *Limit) banned(key uint64, now int64) time.Duration {
	if l.Ban == 0 {
		return 0
	}
	return time.Duration(max(0, l.state.of(key, now).Peek(banKey(key), now)-now))
}

func (l *Limit) late() bool { return l.OnStatus != nil && l.OnStatus.Late }

// settle ends the charge of a limit that looks at the response's final status:
// a right attempt gets back what it was charged, a wrong one is charged late. It
// is called once for each charge; status 0 is no answer at all.
func (l *Limit) settle(c charge, status int, cancelled bool, now int64) {
	// the directive error can give any number, even one that is no status
	counts := 0 <= status && status < len(l.OnStatus.charged) && l.OnStatus.charged[status]
	// who hangs up before the answer has used the attempt
	answered := status != 0 && !cancelled && status != statusClientClosed && status != http.StatusSwitchingProtocols
	if c.shared != nil {
		if l.OnStatus.Late && counts {
			c.shared.charge()
		} else if !l.OnStatus.Late && answered && !counts {
			c.shared.giveBack()
		}
		return
	}
	debts := l.state.of(c.key, now)
	if l.OnStatus.Late {
		if counts {
			increment := c.increment
			if l.app.fleet != nil { // a share of a burst that is smaller than the request
				increment = min(increment, l.gcra.tolerance)
			}
			debts.take(debts.Table, c.key, debts.converted(increment, l.gcra), now)
		}
		return
	}
	l.state.pending.end(debts, c.key, c.mark, answered && !counts, now)
}

// statusClientClosed is what Caddy calls a request whose client hung up.
const statusClientClosed = 499

func (o *OnStatus) validate() error {
	if o == nil {
		return nil
	}
	if len(o.Codes) == 0 {
		return errors.New("on_status: name the status codes to charge for, for example 401 403 5xx")
	}
	for _, code := range o.Codes {
		if len(code) == 3 && code[1:] == "xx" && code[0] >= '2' && code[0] <= '5' {
			first := int(code[0]-'0') * 100
			for status := first; status < first+100; status++ {
				o.charged[status] = true
			}
			continue
		}
		status, err := strconv.Atoi(code)
		if err != nil || status < 200 || status > 599 {
			return fmt.Errorf("on_status %q: must be a status from 200 to 599, or a class from 2xx to 5xx", code)
		}
		o.charged[status] = true
	}
	return nil
}

var namePattern = regexp.MustCompile(`^[a-z0-9_]+$`)

const maxName = 100 // the snapshot's form holds 65535

func validateName(name string) error {
	if name == unresolvedName {
		return fmt.Errorf("the name %q is taken: it stands for clients that could not be resolved", name)
	}
	if len(name) > maxName {
		return fmt.Errorf("the name that begins with %q has %d letters: at most %d are possible", name[:20], len(name), maxName)
	}
	if !namePattern.MatchString(name) {
		return fmt.Errorf("name %q: only a-z, 0-9 and _ are possible", name)
	}
	return nil
}

// validateStatus accepts the statuses that deny something.
func validateStatus(status int) error {
	if status != 0 && (status < 400 || status > 599) {
		return fmt.Errorf("status %d denies nothing: must be from 400 to 599", status)
	}
	return nil
}

const (
	defaultIPv4Prefix = 32
	defaultIPv6Prefix = 64
)

func validatePrefixes(ipv4Bits, ipv6Bits int) error {
	if ipv4Bits < 0 || ipv4Bits > 32 {
		return errors.New("ipv4_prefix must be from 1 to 32")
	}
	if ipv6Bits < 0 || ipv6Bits > 128 {
		return errors.New("ipv6_prefix must be from 1 to 128")
	}
	return nil
}

// rawMatch writes a match so that two can be compared; none is "".
func rawMatch(sets caddyhttp.RawMatcherSets) string {
	if len(sets) == 0 {
		return ""
	}
	text, _ := json.Marshal(sets)
	return string(text)
}

// loadMatchers loads the MatcherSetsRaw of holder.
func loadMatchers(ctx caddy.Context, holder any) (sets caddyhttp.MatcherSets, err error) {
	loaded, err := ctx.LoadModule(holder, "MatcherSetsRaw")
	if err != nil {
		return nil, fmt.Errorf("loading matchers: %w", err)
	}
	return sets, sets.FromInterface(loaded)
}
