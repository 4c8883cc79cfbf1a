package edgelimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"

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
	exceeded error  // what error routes get
	template keyTemplate
	matchers caddyhttp.MatcherSets
	exempt   []caddyhttp.IPRangeSource
	state    *limitState
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
	if l.KeyWriter != "" && l.KeyWriter != "caller" && l.KeyWriter != "server" {
		return fmt.Errorf("key_writer %q: must be caller or server", l.KeyWriter)
	}
	if err := validatePrefixes(l.IPv4Prefix, l.IPv6Prefix); err != nil {
		return err
	}
	if err := validateStatus(l.Status); err != nil {
		return err
	}
	l.match, l.exempted = rawMatch(l.MatcherSetsRaw), len(l.ExemptRaw) > 0
	l.defined = l.definition()
	l.exceeded = &exceededError{"limit", l.Name}
	return nil
}

func (l *Limit) provision(ctx caddy.Context, app *App) (err error) {
	if err = l.validate(); err != nil {
		return fmt.Errorf("limit %s: %w", l.Name, err)
	}
	l.template = keyTemplate{
		parts:    l.key,
		ipv4Bits: firstSet(l.IPv4Prefix, app.IPv4Prefix, defaultIPv4Prefix),
		ipv6Bits: firstSet(l.IPv6Prefix, app.IPv6Prefix, defaultIPv6Prefix),
		secret:   newKeySecret(app.pepper, l.Name),
	}
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
	normal := *l
	normal.Rate = l.rate.String()
	normal.Burst = l.burst()
	normal.Status = l.status()
	if len(normal.Key) == 0 {
		normal.Key = []string{keyClient}
	}
	text, _ := json.Marshal(normal)
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

var namePattern = regexp.MustCompile(`^[a-z0-9_]+$`)

func validateName(name string) error {
	if name == unresolvedName {
		return fmt.Errorf("the name %q is taken: it stands for clients that could not be resolved", name)
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

// firstSet is the first number that is not 0.
func firstSet(numbers ...int) int {
	for _, n := range numbers {
		if n != 0 {
			return n
		}
	}
	return 0
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
