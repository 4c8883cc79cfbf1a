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
	{"http.auth.user.", "the server"}, // set only once an authentication handler has verified it
	{"env.", "the server"},
	{"file.", "the server"},
	{"system.", "the server"},
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
		if strings.HasPrefix(placeholder, known.prefix) {
			return true
		}
	}
	return false
}

// checkProvenance refuses a limit that a caller can escape and that nothing
// bounds. What bounds it is enforced by the same handler on the same requests: a
// ceiling, or a limit keyed by the client alone. Being observed for a trial,
// site-wide or globally, is not judged; being observed by its own word is.
func checkProvenance(limits []*Limit, ceilings []*Ceiling) error {
	for _, limit := range limits {
		placeholder := callerWritten(limit.key)
		if placeholder == "" || limit.KeyWriter != "" || bounded(limit, limits, ceilings) {
			continue
		}
		return &provenanceError{limit: limit.Name, placeholder: placeholder}
	}
	return nil
}

// provenanceError is kept apart so that the Caddyfile can name the line.
type provenanceError struct{ limit, placeholder string }

func (e *provenanceError) Error() string {
	return fmt.Sprintf("limit %s: {%s} in its key is written by the caller, who escapes the limit by writing another value each time; "+
		"add an enforced ceiling or a limit with key client, on the same match, to this edge_limit; "+
		"or say key_writer server if your own server sets it, or key_writer caller if that is meant", e.limit, e.placeholder)
}

func bounded(limit *Limit, limits []*Limit, ceilings []*Ceiling) bool {
	for _, c := range ceilings {
		if !c.Observe && covers(c.match, limit.match) {
			return true
		}
	}
	for _, l := range limits {
		if byClientAlone(l.key) && !l.Observe && !l.exempted && covers(l.match, limit.match) {
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
