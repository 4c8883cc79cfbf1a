package edgelimit

import (
	"fmt"
	"strings"
)

// Whoever writes a part of a key decides which budget a request counts against.
// A part that the caller writes can be renewed at will: such a key throttles
// accidents, not attempts, and needs something beside it that no request can
// influence.

// writerByPlaceholder says who writes what a placeholder stands for, by prefix.
// What is not listed is the caller's: headers, cookies, path, query, method,
// host, port, certificates that may be unverified, and all that is not known.
var writerByPlaceholder = []struct {
	prefix string
	writer string
}{
	{"http.request.remote.host", "the connection"},
	{"http.request.local", "the connection"},
	{"http.request.scheme", "the connection"},
	{"http.auth.user", "the server"}, // set only once an authentication handler has verified it
	{"env", "the server"},
	{"file", "the server"},
	{"system", "the server"},
}

// callerWritten names a placeholder in the key that the caller writes, or
// returns "" if there is none.
func callerWritten(parts []keyPart) string {
	for _, part := range parts {
		for _, piece := range part.pieces {
			if piece.placeholder && !writtenByOthers(piece.text) {
				return piece.text
			}
		}
	}
	return ""
}

func writtenByOthers(placeholder string) bool {
	for _, known := range writerByPlaceholder {
		rest, ok := strings.CutPrefix(placeholder, known.prefix)
		if ok && (rest == "" || rest[0] == '.' || rest[0] == '/') {
			return true
		}
	}
	return false
}

// checkProvenance refuses a limit that a caller can escape and that nothing
// bounds. What bounds it is enforced by the same handler on the same requests: a
// ceiling, or a limit keyed by the client alone that charges every request. Being
// observed for a trial, site-wide or globally, is not judged; being observed by
// its own word is.
func checkProvenance(limits []*Limit, inFlight []*InFlight, ceilings []*Ceiling) error {
	for _, l := range limits {
		placeholder, where := callerWritten(l.key), "key"
		if placeholder == "" {
			placeholder, where = callerWritten(l.cost.parts), "cost"
		}
		if placeholder == "" || l.KeyWriter != "" || bounded(l.match, l, limits, ceilings) {
			continue
		}
		return &provenanceError{kindLimit, l.Name, where, placeholder}
	}
	for _, f := range inFlight {
		if placeholder := callerWritten(f.key); placeholder != "" && !bounded(f.match, nil, limits, ceilings) {
			return &provenanceError{kindInFlight, f.Name, "key", placeholder}
		}
	}
	return nil
}

// provenanceError is kept apart so that the Caddyfile can name the line.
type provenanceError struct{ kind, name, where, placeholder string }

func (e *provenanceError) Error() string {
	text := fmt.Sprintf("%s %s: {%s} in its %s is written by the caller, who escapes it by writing another value each time; "+
		"add an enforced ceiling, or a limit with key client, on the same match to this edge_limit", e.kind, e.name, e.placeholder, e.where)
	if e.kind == kindLimit {
		text += "; or say key_writer server if your own server sets it, or key_writer caller if that is meant"
	}
	return text
}

// bounded says whether something that no request can influence bounds what
// match takes. A limit does not bound itself.
func bounded(match string, itself *Limit, limits []*Limit, ceilings []*Ceiling) bool {
	for _, c := range ceilings {
		if !c.Observe && covers(c.match, match) {
			return true
		}
	}
	for _, l := range limits {
		if l != itself && byClientAlone(l.key) && len(l.cost.parts) == 0 &&
			!l.Observe && !l.exempted && l.OnStatus == nil && covers(l.match, match) {
			return true
		}
	}
	return false
}

// covers says whether a match is known to take all requests that other takes:
// having none, or being the same.
func covers(match, other string) bool { return match == "" || match == other }

// usesRemoteHost says whether the key holds the peer's address.
func usesRemoteHost(parts []keyPart) bool {
	for _, part := range parts {
		for _, piece := range part.pieces {
			if piece.placeholder && strings.HasPrefix(piece.text, "http.request.remote.host") {
				return true
			}
		}
	}
	return false
}
