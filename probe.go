package edgelimit

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strconv"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(Probe{})
}

// Probe answers with how the client of this very request was resolved, as JSON:
//
//	{"resolved": "198.51.100.22", "source": "hops", "reason": "", "trustedProxyHops": 1,
//	 "spoofIgnored": true, "healthy": true, "advice": ""}
//
// `resolved` is null for an unresolved client. `trustedProxyHops` counts the
// entries passed over, and the peer. `spoofIgnored` is true when the request
// carried entries that the caller wrote and none was believed, null when it
// carried none, and false when the answer rests on unverified hops. `healthy` is
// true when the answer is an address that nobody but a trusted writer can have
// chosen. `advice` says what to mend. It must stand behind an edge_limit handler.
//
// A browser, or whoever else prefers `text/html`, gets the same as a page.
type Probe struct {
	// Show the peer and each entry of the chain, which shows the topology.
	// Default: false.
	Detail bool `json:"detail,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (Probe) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.edge_limit_probe",
		New: func() caddy.Module { return new(Probe) },
	}
}

type probeAnswer struct {
	Resolved         *string       `json:"resolved"`
	Source           string        `json:"source"`
	Reason           string        `json:"reason"`
	TrustedProxyHops int           `json:"trustedProxyHops"`
	SpoofIgnored     *bool         `json:"spoofIgnored"`
	Healthy          bool          `json:"healthy"`
	Advice           string        `json:"advice"`
	Peer             *string       `json:"peer,omitempty"`
	Chain            []probedEntry `json:"chain,omitempty"`
}

// probedEntry is one entry of the chain, from left to right.
type probedEntry struct {
	Entry  string `json:"entry"`
	Writer string `json:"writer"` // an address, "unverified", or "caller"
	Read   bool   `json:"read"`
}

// ServeHTTP answers the probe.
func (p *Probe) ServeHTTP(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	state := stateOf(varsOf(r))
	answer := probeAnswer{
		Source: sourceUnresolved.String(),
		Advice: "no edge_limit came before the probe: put the directive edge_limit into the same site, or the same route",
	}
	if state != nil {
		answer = p.answer(state)
	}

	header := w.Header()
	header.Set("Cache-Control", "no-store")
	header.Add("Vary", "Accept")
	header.Set("X-Content-Type-Options", "nosniff")
	var body bytes.Buffer
	var err error
	if prefersHTML(r.Header.Values("Accept")) {
		header.Set("Content-Type", "text/html; charset=utf-8")
		header.Set("Content-Security-Policy", probePagePolicy)
		header.Set("Referrer-Policy", "no-referrer")
		err = probePage.Execute(&body, p.page(state, &answer))
	} else {
		header.Set("Content-Type", "application/json")
		err = json.NewEncoder(&body).Encode(answer)
	}
	if err != nil {
		return caddyhttp.Error(http.StatusInternalServerError, err)
	}
	header.Set("Content-Length", strconv.Itoa(body.Len()))
	if r.Method == http.MethodHead {
		return nil
	}
	_, err = body.WriteTo(w)
	return err
}

func (p *Probe) answer(state *requestState) probeAnswer {
	answer := probeAnswer{
		Source: state.source.String(), Reason: state.reason.String(),
		TrustedProxyHops: int(state.passed), SpoofIgnored: state.spoofIgnored(),
		Healthy: state.reason == reasonNone && !state.unverified, Advice: state.config.advice(&state.resolution),
	}
	if state.peerTrusted || state.proven {
		answer.TrustedProxyHops++
	}
	if state.resolved() {
		client := state.clientText()
		answer.Resolved = &client
	}
	if p.Detail {
		peer := state.peerAddr
		answer.Peer = &peer
		answer.Chain = state.config.explain(&state.resolution)
	}
	return answer
}

// spoofIgnored says whether the caller tried to write its own address: true, and
// not believed; nil, it did not; false, the answer could be the caller's.
func (s *requestState) spoofIgnored() *bool {
	ignored := !s.unverified
	if ignored && !s.unread && !s.forged {
		return nil
	}
	return &ignored
}

// Interface guards.
var _ caddyhttp.MiddlewareHandler = (*Probe)(nil)
