package edgelimit

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// What the command `probe` says of what it saw.

// probeVerdict is what was found, and its exit code.
type probeVerdict int

const (
	verdictSpoofProof  probeVerdict = 0
	verdictUnclear     probeVerdict = 1 // with an error: Caddy's own code for these
	verdictSpoofable   probeVerdict = 10
	verdictUnresolved  probeVerdict = 11
	verdictOverGrouped probeVerdict = 12
)

// gravestFirst orders the verdicts: one that is more urgent comes first.
var gravestFirst = []probeVerdict{verdictSpoofable, verdictOverGrouped, verdictUnresolved, verdictUnclear, verdictSpoofProof}

func (v probeVerdict) String() string {
	switch v {
	case verdictSpoofProof:
		return "spoof-proof"
	case verdictSpoofable:
		return "spoofable"
	case verdictUnresolved:
		return "unresolved"
	case verdictOverGrouped:
		return "over-grouped"
	}
	return "could not tell"
}

// probeFinding is a verdict with its reason, and how to mend it.
type probeFinding struct {
	Verdict string `json:"verdict"`
	Says    string `json:"says"`
	Mend    string `json:"mend,omitempty"`

	verdict probeVerdict
}

func newProbeFinding(v probeVerdict, mend, format string, args ...any) probeFinding {
	return probeFinding{Verdict: v.String(), Says: fmt.Sprintf(format, args...), Mend: mend, verdict: v}
}

// probeRun is all that was sent and answered with one protocol.
type probeRun struct {
	Protocol  string           `json:"protocol"`
	Address   string           `json:"address"`
	From      string           `json:"from"`
	Exchanges []*probeExchange `json:"exchanges"`
	Findings  []probeFinding   `json:"findings"`
	Remarks   []string         `json:"remarks,omitempty"`

	local, remote netip.Addr
	expect        netip.Addr          // the zero Addr: not said
	own           map[netip.Addr]bool // this machine's addresses
}

func (r *probeRun) plain() *probeExchange { return r.Exchanges[0] }

// judgeForged says what became of a forged request, compared with the plain one.
func (r *probeRun) judgeForged(e *probeExchange) {
	plain := r.plain().resolved
	if e.trouble != nil {
		e.Outcome = fateRefused
		silent := e.trouble.kind == troubleSilent || e.trouble.kind == troubleLimited
		if silent && e.Preamble == "" { // whatever a server makes of a preamble, it does not believe it
			e.Outcome = fateFailed
		}
		return
	}
	if e.resolved == plain {
		e.Outcome = fateSame
		return
	}
	if !e.resolved.IsValid() {
		e.Outcome = fateUnresolved
		return
	}
	e.Outcome = fateChanged
	if claim, ok := e.forgery.claimOf(e.resolved); ok {
		e.Outcome, e.Believed = fateBelieved, claim.header
	}
}

// judge finds what the run shows.
func (r *probeRun) judge() {
	if r.judgeSpoofing() {
		r.judgeAddress()
		return
	}
	r.judgeAddress()
	r.judgeCompleteness()
	if len(r.Findings) == 0 {
		r.Findings = append(r.Findings, newProbeFinding(verdictSpoofProof, "", "%d forged requests were sent, and each was resolved like the plain one, to %v",
			r.count(fateSame), r.plain().resolved))
	}
	r.remark()
}

func (r *probeRun) count(outcome probeFate) (n int) {
	for _, e := range r.Exchanges {
		if e.Outcome == outcome {
			n++
		}
	}
	return n
}

// first is the first exchange with this outcome, or nil.
func (r *probeRun) first(outcome probeFate) *probeExchange {
	if i := slices.IndexFunc(r.Exchanges, func(e *probeExchange) bool { return e.Outcome == outcome }); i >= 0 {
		return r.Exchanges[i]
	}
	return nil
}

// judgeSpoofing says whether a caller can choose, or change, who it is.
func (r *probeRun) judgeSpoofing() (spoofable bool) {
	if e := r.first(fateBelieved); e != nil {
		var headers []string
		for _, e := range r.Exchanges {
			if e.Believed != "" && !slices.Contains(headers, e.Believed) {
				headers = append(headers, e.Believed)
			}
		}
		r.Findings = append(r.Findings, newProbeFinding(verdictSpoofable, r.mendSpoofing(e),
			"with %s a caller is whoever it says it is: %s was believed, as in %d of %d forged requests%s",
			strings.Join(headers, ", "), e.resolved, r.count(fateBelieved), r.forgedCount(), r.rotation()))
		return true
	}
	if honest := r.honest(); len(honest) > 1 {
		r.Findings = append(r.Findings, newProbeFinding(verdictUnclear, "", "without anything forged you are resolved now to %s, now to %s: "+
			"your own address changes, or not all servers behind this name are the same", honest[0], honest[1]))
		return false
	}
	if e := r.first(fateChanged); e != nil && r.plain().trouble == nil {
		r.Findings = append(r.Findings, newProbeFinding(verdictSpoofable, r.mendSpoofing(e),
			"with %s a caller changes who it is: it was resolved to %s, and to %s without", e.title(), e.resolved, r.plain().shownResolved()))
		return true
	}
	if e := r.first(fateUnresolved); e != nil {
		mend := e.Answer.Advice
		if slices.ContainsFunc(e.Headers, func(l headerLine) bool { return l.Name == "Connection" }) {
			mend = "a proxy in front obeys the caller's Connection header, and drops what it should send: forbid it there to name X-Forwarded-For"
		}
		r.Findings = append(r.Findings, newProbeFinding(verdictUnresolved, mend,
			"with %s a caller becomes unresolved (%s), and shares that budget instead of its own", e.title(), orNone(printable(e.Answer.Reason, maxWord))))
	}
	return false
}

// rotation says, at the end of a sentence, what a caller gains who is believed.
func (r *probeRun) rotation() string {
	var first netip.Addr
	for _, e := range r.Exchanges {
		switch {
		case e.Outcome != fateBelieved:
		case !first.IsValid():
			first = e.resolved
		case e.resolved != first:
			return ", and each new address has a new budget"
		}
	}
	return ""
}

// honest are the different answers to the plain requests.
func (r *probeRun) honest() (answers []string) {
	for _, e := range r.Exchanges {
		if answer := e.shownResolved(); e.Outcome == fatePlain && e.trouble == nil && !slices.Contains(answers, answer) {
			answers = append(answers, answer)
		}
	}
	return answers
}

func (r *probeRun) forgedCount() int {
	return len(r.Exchanges) - r.count(fatePlain) - r.count(fateNotSent)
}

// title names a forgery in a sentence.
func (e *probeExchange) title() string {
	switch {
	case len(e.Headers) == 0:
		return e.Title
	case e.Headers[0].Name == e.Title:
		return e.Title
	}
	return e.Headers[0].Name + " (" + e.Title + ")"
}

func (e *probeExchange) shownResolved() string {
	if !e.resolved.IsValid() {
		return unresolvedName
	}
	return e.resolved.String()
}

// What mends several of the mistakes.
const (
	hopsTooHighAdvice    = "`hops` is %d too high: lower it by %d, and drop the word unverified if you can name the ranges of your proxies"
	passedOnAdvice       = "whoever connects to Caddy is trusted, and passes on what the caller wrote. "
	nginxForwardedFor    = "in nginx, `proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;`"
	nothingInFrontAdvice = "If nothing stands in front, write `client connection` and no trusted_proxies"
)

// mendSpoofing names what is probably wrong where a forgery worked.
func (r *probeRun) mendSpoofing(e *probeExchange) string {
	plain := r.plain()
	switch header := e.Believed; {
	case header == preambleName:
		return "the listener believes the PROXY protocol from everybody: say in `listener_wrappers`, `proxy_protocol { allow <ranges> }`, who may speak it"
	case header != "" && header != headerForwardedFor && header != headerForwarded:
		return "Caddy is told to read " + header + ", and the proxy in front passes on what the caller wrote there: let it set that header itself " +
			"(in nginx, `proxy_set_header " + header + " $remote_addr;`), or read X-Forwarded-For instead"
	case e.Answer.SpoofIgnored != nil && !*e.Answer.SpoofIgnored:
		excess := r.excess()
		return fmt.Sprintf(hopsTooHighAdvice, excess, excess)
	case !plain.resolved.IsValid() && e.Answer.Source == sourceSingleValue.String():
		return passedOnAdvice + "Let the proxy in front write the address of its own peer, and replace what came: in nginx, `proxy_set_header X-Forwarded-For $remote_addr;`"
	case !plain.resolved.IsValid():
		return passedOnAdvice + "If a proxy stands in front, let it append to X-Forwarded-For: " + nginxForwardedFor + ". " + nothingInFrontAdvice
	case e.Answer.Source == sourceConnection.String():
		return "the address of the connection itself depends on what is sent: look for a proxy in front that dials from the address it is told"
	}
	return "trusted_proxies contains the address that you come from, so the reading goes past it into what a caller writes: " +
		"let it contain your proxies and nothing else, no private ranges and not everybody. " + nothingInFrontAdvice
}

// excess is how far hops reaches into what the caller wrote: where, counted from
// the right, the entry stood that was believed in the longest chain.
func (r *probeRun) excess() int {
	excess, longest := 1, 0
	for _, e := range r.Exchanges {
		if claim, ok := e.forgery.claimOf(e.resolved); ok && e.Outcome == fateBelieved && claim.fromRight > 0 && len(e.forgery.claims) > longest {
			excess, longest = claim.fromRight, len(e.forgery.claims)
		}
	}
	return excess
}

// judgeAddress says whether the plain answer can be this caller's own.
func (r *probeRun) judgeAddress() {
	plain := r.plain()
	if plain.trouble != nil {
		if plain.trouble.kind != troubleDenied || r.first(fateBelieved) == nil {
			return
		}
		r.Findings = append(r.Findings, newProbeFinding(verdictUnresolved, "", "the plain request is denied with status 403, as by `unresolved deny`"))
		return
	}
	if !plain.resolved.IsValid() {
		mend := plain.Answer.Advice
		if len(r.Findings) > 0 {
			mend = "" // the first finding's mends both
		}
		r.Findings = append(r.Findings, newProbeFinding(verdictUnresolved, mend,
			"honest callers cannot be told apart (%s): they share one budget", orNone(printable(plain.Answer.Reason, maxWord))))
		return
	}
	if says := r.overGrouped(); says != "" {
		r.Findings = append(r.Findings, newProbeFinding(verdictOverGrouped, r.mendGrouping(), "%s; everybody who comes that way shares one budget", says))
	}
}

// overGrouped says why the plain answer is not this caller's address, or "".
func (r *probeRun) overGrouped() string {
	plain := r.plain()
	addr := plain.resolved
	switch {
	case r.expect.IsValid():
		if addr != r.expect {
			return fmt.Sprintf("you are resolved to %v, and %v was expected", addr, r.expect)
		}
	case plain.Answer.SpoofIgnored != nil && *plain.Answer.SpoofIgnored:
		// nothing was forged, so a proxy wrote what was not read
		return fmt.Sprintf("you are resolved to %v, but further addresses came with the request, which this command did not write: "+
			"%v is a proxy's, and is not trusted as one", addr, addr)
	case r.isOwn(addr):
	case addr == r.remote:
		return fmt.Sprintf("you are resolved to %v, the address of the server itself", addr)
	case privateRange(addr).IsValid():
		return fmt.Sprintf("you are resolved to %v, a private address that this machine does not have", addr)
	}
	return ""
}

// isOwn says whether addr is this machine's as the other side can see it. Every
// machine has loopback addresses: only the one that was spoken from is meant.
func (r *probeRun) isOwn(addr netip.Addr) bool {
	if addr.IsLoopback() {
		return addr == r.local
	}
	return r.own[addr]
}

// mendGrouping names what is probably wrong where a proxy is taken for the
// client.
func (r *probeRun) mendGrouping() string {
	plain := r.plain()
	if advice := plain.Answer.Advice; advice != "" {
		return advice
	}
	if plain.Answer.Source == sourceConnection.String() {
		return fmt.Sprintf("if %v is your proxy's, let it send X-Forwarded-For (%s) and list it in trusted_proxies; "+
			"Docker's own forwarding hides callers too: publish the port on the host's network. If it is right, say so with --expect %v",
			plain.resolved, nginxForwardedFor, plain.resolved)
	}
	return fmt.Sprintf("more proxies stand in front than Caddy is told: if %v is a proxy's, list its ranges in trusted_proxies "+
		"and raise `hops`, if set, by one. If it is right, say so with --expect %v", plain.resolved, plain.resolved)
}

// judgeCompleteness says whether enough was answered to call it proof.
func (r *probeRun) judgeCompleteness() {
	plain := r.plain()
	switch failed := r.first(fateFailed); {
	case plain.trouble != nil:
		r.Findings = append(r.Findings, newProbeFinding(verdictUnclear, "", "%s", plain.trouble.says))
	case failed != nil:
		r.Findings = append(r.Findings, newProbeFinding(verdictUnclear, "", "%s: %s", failed.title(), failed.trouble.says))
	case r.count(fateSame)+r.count(fateUnresolved) == 0:
		r.Findings = append(r.Findings, newProbeFinding(verdictUnclear, "", "no forged request got as far as the probe: %s", r.first(fateRefused).trouble.says))
	}
}

// remark adds what is no fault, but should be known.
func (r *probeRun) remark() {
	plain := r.plain()
	if plain.trouble != nil || !plain.resolved.IsValid() {
		return
	}
	answer := plain.Answer
	if answer.SpoofIgnored != nil && !*answer.SpoofIgnored {
		r.Remarks = append(r.Remarks, "the answer rests on unverified hops: no forged header got through on this way, "+
			"but whoever reaches an inner proxy directly chooses the answer; probe each inner proxy too, or name their ranges")
	} else if answer.Reason != "" && answer.Advice != "" && r.verdict() != verdictOverGrouped {
		r.Remarks = append(r.Remarks, fmt.Sprintf("%s: %s", printable(answer.Reason, maxWord), printable(answer.Advice, maxSentence)))
	}
	if !r.expect.IsValid() && r.verdict() != verdictOverGrouped {
		switch {
		case !r.isOwn(plain.resolved):
			r.Remarks = append(r.Remarks, fmt.Sprintf("if %v is not your own public address, it is a proxy's, and everybody who comes that way shares one budget: "+
				"say what you expect with --expect <address>", plain.resolved))
		case plain.resolved != r.local:
			r.Remarks = append(r.Remarks, fmt.Sprintf("%v is this machine's own, but not the one that was spoken from (%v): probe from another machine to be sure", plain.resolved, r.local))
		}
	}
	if refused := r.refused(); len(refused) > 0 {
		r.Remarks = append(r.Remarks, fmt.Sprintf("forged requests that were refused before the probe, which harms nobody: %d; the first is %s: %s",
			len(refused), refused[0].title(), refused[0].trouble.says))
	}
}

// refused are the forged requests that did not get as far as the probe, but for
// the PROXY protocol, which only a mistake lets in.
func (r *probeRun) refused() (refused []*probeExchange) {
	for _, e := range r.Exchanges {
		if e.Outcome == fateRefused && e.Preamble == "" {
			refused = append(refused, e)
		}
	}
	return refused
}

// verdict is the gravestFirst of the findings.
func (r *probeRun) verdict() probeVerdict { return gravestOf(r.Findings) }

func gravestOf(findings []probeFinding) probeVerdict {
	for _, v := range gravestFirst {
		if slices.ContainsFunc(findings, func(f probeFinding) bool { return f.verdict == v }) {
			return v
		}
	}
	return verdictUnclear
}

// ownAddresses are those of this machine's interfaces.
func ownAddresses() map[netip.Addr]bool {
	own := make(map[netip.Addr]bool)
	addrs, _ := net.InterfaceAddrs()
	for _, addr := range addrs {
		if ipNet, ok := addr.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(ipNet.IP); ok {
				own[ip.Unmap()] = true
			}
		}
	}
	return own
}
