package edgelimit

import (
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/textproto"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// forwardOff is the word that leaves headers and remote address as they came.
const forwardOff = "off"

// forwarder removes what callers can forge and tells the upstream one client
// address, or none.
//
// Setting X-Forwarded-For does not survive reverse_proxy, which writes it from
// r.RemoteAddr after it has removed what the caller's Connection header names.
// So the remote address is set instead, in place: placeholders and the buffered
// body stay bound to this very request.
type forwarder struct {
	off     bool
	headers []string // canonical, beside X-Forwarded-For
	always  *nameSet // identity headers, removed from everybody
	proof   *nameSet // the proof's headers, removed even when off
}

// fromProxies are believed from a trusted peer and removed from any other.
var fromProxies = newNameSet(headerForwardedProto, headerForwardedHost)

func newForwarder(client *Client, forward, strip []string) forwarder {
	f := forwarder{off: len(forward) == 1 && forward[0] == forwardOff}
	names := append(slices.Clone(identityHeaders), strip...)
	names = append(names, client.Header)
	if !f.off {
		names = append(names, forward...)
	}
	var secrets []string
	if client.Proof != nil {
		secrets = []string{client.Proof.Header, client.Proof.clientHeader()}
	}
	f.proof = newNameSet(secrets...)
	names = append(names, secrets...)
	f.always = newNameSet(names...)
	if !f.off {
		for _, name := range forward {
			f.headers = append(f.headers, http.CanonicalHeaderKey(name))
		}
	}
	return f
}

func validateForward(names []string) error {
	if slices.Contains(names, forwardOff) && len(names) > 1 {
		return fmt.Errorf("forward off leaves all as it came, so no header can be named beside it")
	}
	for _, name := range names {
		if foldName(name) == foldName(headerForwardedFor) {
			return fmt.Errorf("forward: %s always gets the client; name only further headers", headerForwardedFor)
		}
	}
	return validateHeaderNames("forward", names)
}

func validateHeaderNames(option string, names []string) error {
	for _, name := range names {
		if !httpguts.ValidHeaderFieldName(name) {
			return fmt.Errorf("%s: %q is no name of a header", option, name)
		}
		if slices.Contains(messageHeaders, foldName(name)) {
			return fmt.Errorf("%s: %s belongs to the message itself, and names no client", option, name)
		}
	}
	return nil
}

// messageHeaders hold a request together: to write or remove one is a mistake.
var messageHeaders = []string{"host", "connection", "content-length", "transfer-encoding", "te", "trailer", "upgrade", "expect"}

// remove takes the identity headers out of the request: by name and look-alike,
// from Connection, and from trailers. It calls removed for each.
func (f *forwarder) remove(r *http.Request, peerTrusted bool, removed func(name string)) {
	names := f.always
	if f.off {
		names = f.proof
	}
	for name := range r.Header {
		switch {
		case names.contains(name):
			removed(name)
			delete(r.Header, name)
		case !f.off && !peerTrusted && fromProxies.contains(name):
			delete(r.Header, name)
		}
	}
	if connection, ok := r.Header["Connection"]; ok {
		unname(r.Header, connection, names)
	}
	if r.Trailer != nil {
		removeTrailers(r, names, f.off || peerTrusted)
	}
}

// unname removes identity headers' names from the Connection header, by which a
// caller could have them dropped further on. Tokens are trimmed as reverse_proxy
// trims them, line ends too, so that both see the same names.
func unname(h http.Header, connection []string, names *nameSet) {
	named := func(token string) bool { return token != "" && names.contains(textproto.TrimString(token)) }
	if !slices.ContainsFunc(connection, func(line string) bool {
		for token := range strings.SplitSeq(line, ",") {
			if named(token) {
				return true
			}
		}
		return false
	}) {
		return
	}
	// A list of all tokens would be sixteen times as long as a line of commas.
	var kept []string
	for _, line := range connection {
		rest := make([]byte, 0, len(line)+1)
		for token := range strings.SplitSeq(line, ",") {
			if !named(token) {
				rest = append(append(rest, token...), ',')
			}
		}
		if len(rest) > 0 {
			kept = append(kept, string(rest[:len(rest)-1]))
		}
	}
	if len(kept) == 0 {
		delete(h, "Connection")
		return
	}
	h["Connection"] = kept
}

// removeTrailers removes identity headers from the trailers: the announced ones
// now, and all of them again when the body ends, where net/http adds what came.
func removeTrailers(r *http.Request, names *nameSet, proxied bool) {
	remove := func() {
		for name := range r.Trailer {
			if names.contains(name) || !proxied && fromProxies.contains(name) {
				delete(r.Trailer, name)
			}
		}
	}
	remove()
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = &trailerRemover{ReadCloser: r.Body, remove: remove}
	}
}

// trailerRemover is a body at whose end trailers are removed.
type trailerRemover struct {
	io.ReadCloser
	remove func()
}

func (b *trailerRemover) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.remove()
	}
	return n, err
}

// tell sets what the upstream will be told. The caller puts r.RemoteAddr back.
func (f *forwarder) tell(r *http.Request, state *requestState) {
	if f.off {
		return
	}
	state.vars[caddyhttp.TrustedProxyVarKey] = state.peerTrusted
	if !state.resolved() {
		tellNone(r)
		return
	}
	// an earlier run may have left the marker of an unresolved client
	delete(r.Header, headerForwardedFor)
	r.RemoteAddr = state.remoteAddr
	for _, name := range f.headers {
		value := state.clientText()
		if name == headerForwarded {
			value = forwardedElement(state.client)
		}
		r.Header[name] = []string{value}
	}
}

// writes says whether the upstream gets the client in that header.
func (f *forwarder) writes(name string) bool { return slices.Contains(f.headers, name) }

// tellNone keeps reverse_proxy from writing X-Forwarded-For: it takes a header
// that is there with a nil value as the wish to have none.
func tellNone(r *http.Request) { r.Header[headerForwardedFor] = nil }

// forwardedElement writes a client as RFC 7239 wants it.
func forwardedElement(client netip.Addr) string {
	if client.Is6() {
		return `for="[` + client.String() + `]"`
	}
	return "for=" + client.String()
}

// nameSet is a set of header names that also knows their look-alikes: CGI,
// FastCGI and PHP make X-Real-IP, X_Real_IP and X.Real.IP one variable.
type nameSet struct {
	byLength [64][]string // folded; the last one has all that are longer
}

// newNameSet makes a set of names that are compared by foldName.
func newNameSet(names ...string) *nameSet {
	set := new(nameSet)
	for _, name := range names {
		folded := foldName(name)
		if same := set.alike(name); !slices.Contains(*same, folded) {
			*same = append(*same, folded)
		}
	}
	return set
}

// alike are the names as long as this one.
func (s *nameSet) alike(name string) *[]string { return &s.byLength[min(len(name), len(s.byLength)-1)] }

func (s *nameSet) contains(name string) bool {
	for _, folded := range *s.alike(name) {
		if len(folded) == len(name) && foldsTo(name, folded) {
			return true
		}
	}
	return false
}

// foldName is the form in which names are compared: small letters, and one sign
// for all that is neither letter nor digit.
func foldName(name string) string {
	folded := make([]byte, len(name))
	for i := range len(name) {
		folded[i] = foldedBytes[name[i]]
	}
	return string(folded)
}

func foldsTo(name, folded string) bool {
	for i := range len(name) {
		if foldedBytes[name[i]] != folded[i] {
			return false
		}
	}
	return true
}

// foldedBytes has for each byte the one that it is compared as.
var foldedBytes = func() (table [256]byte) {
	for i := range table {
		switch b := byte(i); {
		case 'A' <= b && b <= 'Z':
			table[i] = b + 'a' - 'A'
		case 'a' <= b && b <= 'z', '0' <= b && b <= '9':
			table[i] = b
		default:
			table[i] = '-'
		}
	}
	return table
}()
